"""A memory budget as a pass over a step's graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.sizes import largest_sizes, uncertain
from hyper_parallel.offload.apply import apply
from hyper_parallel.offload.choose import choose
from hyper_parallel.offload.moves import Plan
from hyper_parallel.offload.problem import Problem, Space
from hyper_parallel.offload.problem_of import problem_of
from hyper_parallel.offload.shelf import Places, Shelves
from hyper_parallel.units import format_bytes, format_duration

_TRIES = 4


@dataclass(frozen=True)
class Planned:
    """A step under a budget."""

    step: StepGraph
    plan: Plan
    problem: Problem
    shelves: Shelves
    """Where its slots lie, and those of the plans beside it."""
    load: float | None = None
    """How many times their even share of the rows a rank's experts may get; None where no size depends on it."""

    @property
    def places(self) -> dict[str, Places]:
        """Space to the slots in it."""
        return {name: shelf.places for name, shelf in self.shelves.tiers.items()}

    def __str__(self) -> str:
        """In one line."""
        free = max(self.problem.profile(), default=0)
        moved = sum(self.problem.by_storage[move.storage].bytes for move in self.plan.moves)
        before, after = self.problem.starts[-1], self.plan.seconds
        load = "" if self.load is None else f", experts' rows at most {self.load:g} times their even share"
        return (
            f"memory: {format_bytes(self.plan.peak)} at most of {format_bytes(self.problem.budget)}, "
            f"{format_bytes(free)} without a budget; {format_bytes(moved)} a step go and come back; foreseen "
            f"{format_duration(after)} a step, {after / before:.2f} times as long as without{load}"
        )


def planned(
    step: StepGraph,
    cluster: Cluster,
    budget: int,
    spaces: tuple[Space, ...],
    shelves: Shelves | None = None,
    number: int = 0,
    load: float = 1.0,
) -> Planned:
    """The step with the moves that keep it within `budget` bytes. `shelves`: the slots of the plans that the spaces
    hold already, whose state is this one's too; `number`: by which these know this plan. `load`: how many times their
    even share of the rows a rank's experts get at most.

    Raises BudgetError where no plan does.
    """
    before = shelves or Shelves.of(space.name for space in spaces)
    known = before.numbers(step)
    sizes, largest = balanced_sizes(step), largest_sizes(step, load)
    problem = problem_of(step, cluster, budget, spaces, sizes, largest)
    asked = problem
    for _ in range(_TRIES):
        plan = choose(asked)
        moved = apply(step, problem, plan.moves, before.next, known)
        after = before.holding(number, moved)
        over = {space.name: after.tiers[space.name].size - space.bytes for space in spaces}
        if all(more <= 0 for more in over.values()):
            return Planned(moved, plan, problem, after, load if uncertain(step) else None)
        # Slots of different sizes leave holes between them, and state of other plans stays: so much less may lie there
        # at once.
        less = tuple(replace(space, bytes=space.bytes - max(0, over[space.name])) for space in asked.spaces)
        asked = replace(asked, spaces=less)
    told = ", ".join(f"{name} {format_bytes(more)}" for name, more in over.items() if more > 0)
    raise BudgetError(
        f"what must leave the device fits into the memory beside it only in pieces (too large by: {told}); give it a "
        "little more, or the device"
    )


@dataclass
class Offload:
    """`planned` as a pass, which keeps what it found."""

    cluster: Cluster
    budget: int
    spaces: tuple[Space, ...]
    found: list[tuple[StepGraph, Planned]] = field(default_factory=list)
    """The steps that it was given, and what came of them."""

    name: str = "offload"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"offload"})
    conflicts: frozenset[str] = frozenset({"offload"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The step with its moves."""
        found = planned(step, self.cluster, self.budget, self.spaces)
        self.found.append((step, found))
        return found.step
