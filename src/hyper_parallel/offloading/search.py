"""Other graphs for the same step: the one whose plan is quickest.

A step may be changed in several ways that leave its bits as they are, each by a dial: 0 leaves the graph alone. A
setting of all dials is a graph, and the graph has a plan; the plan's seconds (`replay`) decide. The search

    begins with the step as it is;
    turns one dial after the other, that of most settings first, to where it helps most often and halfway there;
    goes on around the best found so far, by two settings of each dial and then by one,

and stops where a step takes no longer than without a budget, or after `PLANS` plans, or sooner where a step is so quick
that looking on would take longer than it could save in `REPAID` steps. There are no clocks in it: the same step gives
the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.groups import is_collective, is_wait
from hyper_parallel.graph.host import HOST
from hyper_parallel.offloading.choose import choose
from hyper_parallel.offloading.moves import Plan
from hyper_parallel.offloading.problem import Problem

SMALL = 0.01
"""Of the seconds of the step without a budget: where a plan adds less to them, no other graph is looked for."""
BETTER = 5e-3
"""Of a step's seconds: what another graph must save at least."""
PLANS = 8
"""Those that are tried at most; and no more than"""
REPAID = 30
"""steps pay for, if all of their waiting were saved, where a try takes about"""
PRICE = 5e-4
"""seconds for each node of the step."""


@dataclass(frozen=True)
class Dial:
    """One way to change a step's graph."""

    name: str
    settings: int
    """How many there are: 0, which changes nothing, up to `settings` − 1."""
    usual: int
    """Where it helps most often."""
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


def search(
    step: StepGraph, problem: Problem, dials: Sequence[Dial], problem_of: Callable[[StepGraph], Problem]
) -> Variant:
    """The best graph found for a step, and its plan. Raises BudgetError where no plan of any meets the budget.

    `problem`: the step's memory under the budget; `problem_of`: that of another graph.
    """
    found = _Search(step, problem, dials, problem_of)
    found.climb()
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
    ) -> None:
        self._problem = problem
        self._dials, self._problem_of = dials, problem_of
        self._talk = _talk(step)
        self._graphs: dict[tuple[int, ...], StepGraph] = {(): step}
        """By the settings of the first dials."""
        self._tried: set[tuple[int, ...]] = set()
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
            waits = self.best.plan.seconds - _seconds(self._problem)
            self._plans = min(self._plans, int(REPAID * waits / (PRICE * self._problem.nodes)))
        if self._done():
            return
        if self.best is None:
            self._try(tuple(dial.usual for dial in self._dials))
        if self.best is None:
            return
        for at in sorted(range(len(self._dials)), key=lambda at: -self._dials[at].settings):
            now, usual = self.best.settings, self._dials[at].usual
            for setting in (usual, usual // 2):
                if not self._done():
                    self._try((*now[:at], setting, *now[at + 1 :]))
        width = 2
        while width and not self._done():
            before = self.best
            for settings in self._around(self.best.settings, width):
                if not self._done():
                    self._try(settings)
            if self.best is before:
                width //= 2

    def _done(self) -> bool:
        if self._plans <= 0:
            return True
        return self.best is not None and self.best.plan.seconds <= (1 + SMALL) * _seconds(self._problem)

    def _around(self, settings: tuple[int, ...], width: int) -> Iterator[tuple[int, ...]]:
        for at, dial in enumerate(self._dials):
            for setting in (settings[at] - width, settings[at] + width):
                if 0 <= setting < dial.settings:
                    yield (*settings[:at], setting, *settings[at + 1 :])

    def _try(self, settings: tuple[int, ...]) -> None:
        if settings in self._tried:
            return
        self._tried.add(settings)
        step = self._graph(settings)
        assert _talk(step) == self._talk, (
            f"a change of a step's graph keeps what it says to others: {settings}"
        )
        problem = self._problem_of(step) if any(settings) else self._problem
        if self.best is not None and _seconds(problem) >= self.best.plan.seconds:
            return
        self._plans -= 1
        try:
            plan = choose(problem, tries=0)
        except BudgetError as error:
            self.refused.append(error)
            return
        if self.best is None or plan.seconds < self.best.plan.seconds * (1 - BETTER):
            self.best = Variant(settings, step, problem, plan)

    def _graph(self, settings: tuple[int, ...]) -> StepGraph:
        if settings not in self._graphs:
            before = self._graph(settings[:-1])
            dial = self._dials[len(settings) - 1]
            self._graphs[settings] = (
                dial.turn(before, settings[-1], bool(self.refused)) if settings[-1] else before
            )
        return self._graphs[settings]


def _seconds(problem: Problem) -> float:
    """Of a step in which nothing waits for memory."""
    return problem.starts[-1] - problem.starts[0]


def _talk(step: StepGraph) -> list[str]:
    """What a step says to other ranks and to the host, in order."""
    return [node.name for node in step.nodes if node.target is HOST or is_collective(node) or is_wait(node)]
