"""Search over equivalent graphs of a step for the fastest offload plan.

A step may be changed in several ways that leave its bits as they are, each by a dial: 0 leaves the graph alone. A
setting of all dials is a graph, and the graph has a plan; the plan's seconds (`replay`) decide. The search is one by
pattern (Hooke and Jeeves, J. ACM 8, 1961):

    begin with the step as it is;
    turn one dial after the other, in their order of rank, by half of its settings either way from the best so far, then
    by half as many, down to one;
    at last turn each dial by one either way again, while that helps,

and stop where a step takes no longer than without a budget, or after `PLANS` graphs, or sooner where a step is so quick
that looking on would take longer than it could save in `REPAID` steps. On the way graphs are weighed by quick plans
(`choose`, `quick`); the best few of them and the step as it is are then planned in earnest. There are no clocks in it:
the same step gives the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import is_collective, is_wait
from hyper_parallel.offloading.schedule.problem import Plan, Problem
from hyper_parallel.offloading.schedule.solve import choose

SMALL = 0.01
"""Of the seconds of the step without a budget: where a plan adds less to them, no other graph is looked for."""
BETTER = 5e-3
"""Of a step's seconds: what another graph must save at least."""
PLANS = 12
"""Graphs that are tried at most; and no more than"""
REPAID = 30
"""steps pay for, if all of their waiting were saved, where a try takes about"""
PRICE = 1.5e-4
"""seconds for each node of the step."""
LAST = 3
"""Graphs that are planned in earnest, the best ones by quick plans."""


@dataclass(frozen=True)
class Dial:
    """One way to change a step's graph."""

    name: str
    settings: int
    """How many there are: 0, which changes nothing, up to `settings` − 1."""
    rank: int
    """Dials of a lower one are turned first: what they change matters more to what others gain than the other way."""
    turn: Callable[[StepGraph, int, bool], StepGraph]
    """The step at a setting; the last argument: no plan of the step as it is meets the budget. Collectives, their waits
    and host points stay, in the same order."""


@dataclass(frozen=True)
class Variant:
    """The step with its dials set."""

    settings: tuple[int, ...]
    step: StepGraph
    problem: Problem
    plan: Plan
    refused: bool = False
    """It was looked for because no plan of the step as it is meets the budget."""


def search(
    step: StepGraph,
    problem: Problem,
    dials: Sequence[Dial],
    problem_of: Callable[[StepGraph], Problem],
    progress: Callable[[int, int], None] = lambda count, left: None,
    part: float = 1.0,
) -> Variant:
    """The best graph found for a step, and its plan. Raises BudgetError where no plan of any meets the budget.

    `problem`: the step's memory under the budget; `problem_of`: that of another graph. `progress` is called before each
    plan with its number and how many may follow. `part`: of a step that stands for one of more layers, the
    share of them that it has: what it saves counts so much more, and quick plans decide.
    """
    found = _Search(step, problem, dials, problem_of, progress, part)
    found.climb()
    if part == 1.0:
        found.in_earnest()
    if found.best is None:
        raise min(found.refused, key=lambda error: (error.floor is None, error.floor))
    return found.best


class _Search:
    def __init__(
        self,
        step: StepGraph,
        problem: Problem,
        dials: Sequence[Dial],
        problem_of: Callable[[StepGraph], Problem],
        progress: Callable[[int, int], None],
        part: float,
    ) -> None:
        self._problem, self._part = problem, part
        self._progress, self._count = progress, 0
        self._dials, self._problem_of = dials, problem_of
        self._talk = _talk(step)
        self._graphs: dict[tuple[int, ...], StepGraph] = {(): step}
        """By the settings of the first dials."""
        self._tried: dict[tuple[int, ...], Variant] = {}
        """Settings to what was found, where a plan was made."""
        self._seen: set[tuple[int, ...]] = set()
        self.best: Variant | None = None
        self.refused: list[BudgetError] = []
        """Of graphs that do not meet the budget."""
        self._plans = PLANS
        """How many more are tried."""

    def climb(self) -> None:
        """Look for the best."""
        zero = tuple(0 for _ in self._dials)
        self._try(zero)
        if self.best is not None:
            waits = (self.best.plan.seconds - self._problem.seconds) / self._part
            self._plans = min(self._plans, int(REPAID * waits / (PRICE * self._problem.nodes)))
        else:
            self._try(tuple(dial.settings - 1 for dial in self._dials))
        if self.best is None:
            return
        ranked = sorted(range(len(self._dials)), key=lambda at: self._dials[at].rank)
        for at in ranked:
            width = self._dials[at].settings // 2
            while width:
                self._turn(at, width)
                width //= 2
        before = None
        while before is not self.best and not self._done():
            before = self.best
            for at in ranked:
                self._turn(at, 1)

    def _turn(self, at: int, width: int) -> None:
        """Try a dial's settings so far from the best one, on and on while that is better."""
        assert self.best is not None
        for by in (width, -width):
            before = None
            while before is not self.best and not self._done():
                before = self.best
                setting = before.settings[at] + by
                if 0 <= setting < self._dials[at].settings:
                    self._try((*before.settings[:at], setting, *before.settings[at + 1 :]))

    def in_earnest(self) -> None:
        """Plan the best graphs as well as it goes."""
        if self.best is None:
            return
        found = sorted(self._tried.values(), key=lambda variant: variant.plan.seconds)[:LAST]
        planned = []
        for left, variant in zip(reversed(range(len(found))), found, strict=True):
            self._step_on(left)
            better = choose(variant.problem, tries=0) if variant.plan.stall else variant.plan
            planned.append(replace(variant, plan=better))
        self.best = min(planned, key=lambda variant: variant.plan.seconds)

    def _done(self) -> bool:
        if self._plans <= 0:
            return True
        return self.best is not None and self.best.plan.seconds <= (1 + SMALL) * self._problem.seconds

    def _step_on(self, left: int) -> None:
        """Another plan is made, and `left` may follow."""
        self._count += 1
        self._progress(self._count, left)

    def _try(self, settings: tuple[int, ...]) -> None:
        if settings in self._seen:
            return
        self._seen.add(settings)
        step = self._graph(settings)
        assert _talk(step) == self._talk, (
            f"a change of a step's graph keeps what it says to others: {settings}"
        )
        problem = self._problem_of(step) if any(settings) else self._problem
        if self.best is not None and problem.seconds >= self.best.plan.seconds:
            return
        self._plans -= 1
        self._step_on(max(self._plans, 0) + LAST)
        try:
            plan = choose(problem, quick=True, part=self._part)
        except BudgetError as error:
            self.refused.append(error)
            return
        self._tried[settings] = found = Variant(settings, step, problem, plan, bool(self.refused))
        if self.best is None or plan.seconds < self.best.plan.seconds * (1 - BETTER):
            self.best = found

    def _graph(self, settings: tuple[int, ...]) -> StepGraph:
        if settings not in self._graphs:
            before = self._graph(settings[:-1])
            dial = self._dials[len(settings) - 1]
            self._graphs[settings] = (
                dial.turn(before, settings[-1], bool(self.refused)) if settings[-1] else before
            )
        return self._graphs[settings]


def _talk(step: StepGraph) -> list[str]:
    """The messages of a step to other ranks and to the host, in order."""
    return [node.name for node in step.nodes if node.target is HOST or is_collective(node) or is_wait(node)]
