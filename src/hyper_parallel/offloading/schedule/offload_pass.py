"""The offload pass: rewrites a StepGraph so that its peak memory meets a budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, balanced_sizes, validate
from hyper_parallel.graph.dynamic_sizes import largest_sizes, uncertain
from hyper_parallel.graph.no_gc import uncollected
from hyper_parallel.offloading.schedule.allowed_rewrites import ANY, Choices, changes
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.graph_search import search
from hyper_parallel.offloading.schedule.host_update_pass import on_host
from hyper_parallel.offloading.schedule.insert_transfers import apply
from hyper_parallel.offloading.schedule.problem import OffloadTier, Problem
from hyper_parallel.offloading.schedule.slot_allocator import Places, SlotAllocator
from hyper_parallel.offloading.schedule.solve import choose
from hyper_parallel.offloading.schedule.transfers import Plan
from hyper_parallel.units import format_bytes, format_duration

_TRIES = 5
"""Plans whose slots may turn out not to fit where they are to lie."""


@dataclass(frozen=True)
class Planned:
    """A step under a budget."""

    step: StepGraph
    plan: Plan
    problem: Problem
    shelves: SlotAllocator
    """Where its slots lie, and those of the plans beside it."""
    load: float | None
    """How many times their even share of the rows a rank's experts may get; None where no size depends on it."""
    graph: StepGraph
    """The step with what was changed in it, before its moves: places in the problem are those of its nodes."""
    captured: Problem
    """The memory of the step as it was given."""
    changed: tuple[str, ...] = ()
    """What was changed in the step beside moves, in words."""

    @property
    def places(self) -> dict[str, Places]:
        """Space to the slots in it."""
        return {name: shelf.places for name, shelf in self.shelves.tiers.items()}

    def __str__(self) -> str:
        """In one line."""
        free = max(self.captured.profile(), default=0)
        moved = sum(self.problem.by_storage[move.storage].bytes for move in self.plan.moves)
        before, after = self.captured.starts[-1], self.plan.seconds
        load = "" if self.load is None else f", experts' rows at most {self.load:g} times their even share"
        changed = "".join(f"; {what}" for what in self.changed)
        return (
            f"memory: {format_bytes(self.plan.peak)} at most of {format_bytes(self.problem.budget)}, "
            f"{format_bytes(free)} without a budget; {format_bytes(moved)} a step go and come back{changed}; predicted "
            f"{format_duration(after)} a step, {after / before:.2f} times as long as without{load}"
        )


@uncollected()
def planned(
    step: StepGraph,
    cluster: Cluster,
    budget: int,
    spaces: tuple[OffloadTier, ...],
    shelves: SlotAllocator | None = None,
    number: int = 0,
    load: float = 1.0,
    choices: Choices = ANY,
) -> Planned:
    """The step with the moves that keep it within `budget` bytes, and with the changes that make it quicker. `shelves`:
    the slots of the plans that the spaces hold already, whose state is this one's too; `number`: by which these know
    this plan. `load`: how many times their even share of the rows a rank's experts get at most.

    Raises BudgetError where no plan does.
    """
    before = shelves or SlotAllocator.of(space.name for space in spaces)
    captured: Problem | None = None
    left = spaces
    for attempt in range(_TRIES):
        found = _chosen(step, cluster, budget, left, load, choices)
        captured = captured or found.captured
        graph, problem, plan = found.graph, found.problem, found.plan
        moved = apply(graph, problem, plan.moves, before.next, before.numbers(graph))
        after = before.holding(number, moved)
        over = {space.name: after.tiers[space.name].size - space.bytes for space in spaces}
        if all(more <= 0 for more in over.values()):
            most = load if uncertain(step) else None
            changed = changes(step, graph, problem)
            return Planned(moved, plan, problem, after, most, graph, captured, changed)
        # Slots of different sizes leave holes between them, and state of other plans stays: so much less may lie there
        # at once. What is taken off grows, and at last nothing goes there as long as other memory has room.
        elsewhere = attempt == _TRIES - 2 and any(more <= 0 for more in over.values())
        left = tuple(
            replace(space, bytes=0 if elsewhere else max(0, space.bytes - (over[space.name] << attempt)))
            if over[space.name] > 0
            else space
            for space in left
        )
    told = ", ".join(f"{name} {format_bytes(more)}" for name, more in over.items() if more > 0)
    raise BudgetError(
        f"what must leave the device fits into the memory beside it only in pieces (too large by: {told}); give it a "
        "little more, or the device"
    )


@dataclass(frozen=True)
class _Chosen:
    """What was chosen for a step, before its slots have places."""

    graph: StepGraph
    problem: Problem
    plan: Plan
    captured: Problem


def _chosen(
    step: StepGraph,
    cluster: Cluster,
    budget: int,
    spaces: tuple[OffloadTier, ...],
    load: float,
    choices: Choices,
) -> _Chosen:
    """The best graph for a step, and its plan. Raises BudgetError where none meets the budget."""
    sizes, largest = balanced_sizes(step), largest_sizes(step, load)

    @cache
    def memory(graph: StepGraph) -> Problem:
        return build_problem(graph, cluster, budget, spaces, sizes, largest)

    captured = memory(step)
    begun = on_host(step, spaces) if choices.update == "host" else step
    dials = choices.dials(step, cluster, spaces, memory, sizes)
    found = search(begun, captured if begun is step else memory(begun), dials, memory)
    validate(step, found.step)
    # The search tries many graphs and looks at each a little; what it has found is worth a longer look.
    plan = choose(found.problem) if found.plan.stall else found.plan
    return _Chosen(found.step, found.problem, plan, captured)


@dataclass
class Offload:
    """`planned` as a pass, which keeps what it found. Fields are the arguments of `planned`."""

    cluster: Cluster
    budget: int
    spaces: tuple[OffloadTier, ...]
    choices: Choices = ANY
    shelves: SlotAllocator | None = None
    number: int = 0
    load: float = 1.0
    found: list[Planned] = field(default_factory=list)
    """What came of the steps that it was given."""

    name: str = "offload"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"offload"})
    conflicts: frozenset[str] = frozenset({"offload"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The step with its moves."""
        found = planned(
            step,
            self.cluster,
            self.budget,
            self.spaces,
            self.shelves,
            self.number,
            self.load,
            self.choices,
        )
        self.found.append(found)
        return found.step
