"""The offload pass: plans a step under a budget, inserts the plan's transfers, and explains the plan in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import Slot, StepGraph, ir, validate
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.dynamic_sizes import uncertain
from hyper_parallel.graph.host_nodes import is_update, slot_arguments, storages_of, tier_of
from hyper_parallel.graph.ir import Rest, Value
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.offloading.schedule.allowed_rewrites import ANY, Choices, changes
from hyper_parallel.offloading.schedule.equal_graphs import EqualGraphs, Settings
from hyper_parallel.offloading.schedule.planning_progress import PlanningProgress
from hyper_parallel.offloading.schedule.problem import (
    FETCH,
    LEAVE,
    STORE,
    USE,
    Event,
    Move,
    OffloadTier,
    Plan,
    Problem,
    events_of,
    replay,
)
from hyper_parallel.offloading.schedule.slot_allocator import Places, SlotAllocator
from hyper_parallel.trace import pattern
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
    show: Callable[[str], None] | None = None,
) -> Planned:
    """The step with the moves that keep it within `budget` bytes, and with the changes that make it quicker. `shelves`:
    the slots of the plans that the spaces hold already, whose state is this one's too; `number`: by which these know
    this plan. `load`: how many times their even share of the rows a rank's experts get at most. `show`: is given lines
    about the progress of what takes long.

    Raises BudgetError where no plan does.
    """
    before = shelves or SlotAllocator.of(space.name for space in spaces)
    progress = PlanningProgress(show)
    captured: Problem | None = None
    settings: Settings | None = None
    left = spaces
    for attempt in range(_TRIES):
        graphs = EqualGraphs(step, cluster, budget, left, load, choices)
        captured = captured or graphs.captured
        settings = settings or graphs.settings_of_few_layers(progress)
        found = (settings and graphs.turned(settings)) or graphs.best(progress)
        graph, problem, plan = found.step, found.problem, found.plan
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
    excess = ", ".join(f"{name} {format_bytes(more)}" for name, more in over.items() if more > 0)
    raise BudgetError(
        f"what must leave the device fits into the memory beside it only in pieces (too large by: {excess}); give it a "
        "little more, or the device"
    )


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
    show: Callable[[str], None] | None = None
    found: list[Planned] = field(default_factory=list)
    """What came of the steps that it was given."""

    name: str = "offload"
    provides: frozenset[str] = frozenset({"offload"})
    conflicts: frozenset[str] = frozenset({"offload"})

    def __call__(self, step: StepGraph) -> StepGraph:
        found = planned(
            step,
            self.cluster,
            self.budget,
            self.spaces,
            self.shelves,
            self.number,
            self.load,
            self.choices,
            self.show,
        )
        self.found.append(found)
        return found.step


# Inserts a plan's transfers into the graph as tier operators.
#
# Right before a node stand, in this order: the stores that begin there; of what leaves there the wait for its store and
# the `detach`; the prefetches, which take memory that was given up just before; the waits for what the node uses. An
# update on the host is given the slots of its storages; the state that only it needs rests in them for good.

_Operator = Callable[..., object]
_OPERATORS: dict[int, tuple[_Operator, ...]] = {
    STORE: (ir.store,),
    LEAVE: (ir.wait, ir.detach),
    FETCH: (ir.prefetch,),
    USE: (ir.wait,),
}


def apply(
    step: StepGraph,
    problem: Problem,
    moves: Iterable[Move],
    first: int = 0,
    known: Mapping[tuple[int, str], int] | None = None,
) -> StepGraph:
    """The step with these moves; `step` stays as it is. `first`: the number of its first slot, but for those that
    storages have in spaces already (`known`).

    Raises GraphError for moves that would read what is away.
    """
    copy = step.copy()
    nodes = list(copy.nodes)
    events = sorted(event for move in moves for event in events_of(problem, move))
    numbers: dict[tuple[int, str], int] = {}
    updates = [(at, node) for at, node in enumerate(nodes) if is_update(node)]
    worked_on = [(storage, tier_of(node)) for _, node in updates for storage in storages_of(node)]
    for place in (*((event.storage, event.space) for event in events), *worked_on):
        if place not in numbers:
            number = (known or {}).get(place)
            numbers[place] = first if number is None else number
            first += number is None
    copy.slots = _slots(copy, problem, events, numbers)
    for _, node in updates:
        slot_arguments(node, tuple(numbers[storage, tier_of(node)] for storage in storages_of(node)))
    names = _names(copy)
    for event in events:
        after = nodes[event.place]
        for operator in _OPERATORS[event.turn]:
            with copy.graph.inserting_before(after):
                slot = numbers[event.storage, event.space]
                moved = copy.graph.call_function(operator, (names[event.storage], slot, event.space))
            moved.meta = {**{key: after.meta[key] for key in ("region", "module")}, "recomputed": False}
    validate(step, copy)
    return copy


def _slots(
    step: StepGraph, problem: Problem, events: list[Event], numbers: dict[tuple[int, str], int]
) -> dict[int, Slot]:
    of: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        of[event.storage, event.space].append(event)
    return {
        number: _slot(problem, storage, space, of[storage, space])
        if (storage, space) in of
        else Slot(storage, space, step.storages[storage].bytes, "away", 0, problem.nodes)
        for (storage, space), number in numbers.items()
    }


def _slot(problem: Problem, storage: int, space: str, events: list[Event]) -> Slot:
    rest, must = _rest(events), problem.by_storage[storage].must
    until = events[-1].place if must is None else max(events[-1].place, must.update)
    first, last = (events[0].place, until) if rest == "step" else (0, problem.nodes)
    return Slot(storage, space, problem.by_storage[storage].bytes, rest, first, last)


def _rest(events: list[Event]) -> Rest:
    """What a slot is between steps: what it must be for the first of its events in a step."""
    first = events[0].turn
    if first == STORE:
        return "step"
    return "away" if first == FETCH else "here"


def _names(step: StepGraph) -> dict[int, fx.Node]:
    """For each storage, the first node that gives a value in it, by which cache operators name it."""
    found: dict[int, fx.Node] = {}
    for node in (*step.placeholders, *step.nodes):
        value = node.meta.get("value")
        if isinstance(value, Value):
            found.setdefault(value.storage, node)
    return found


_SHOWN = 24


@dataclass(frozen=True)
class _Row:
    """Moves that are alike: of the same sort of storage, between the same phases."""

    what: str
    space: str
    since: str
    until: str


def explained(found: Planned) -> str:
    """Several lines: the budget and what a plan needs at least, then a line for each sort of storage that moves."""
    problem, plan = found.problem, found.plan
    lines = [
        str(found),
        f"  no plan needs less than {format_bytes(plan.working_set)} (what single operators use), and this planner no "
        f"less than {format_bytes(plan.floor)}",
        "",
    ]
    phases = [
        f"{region_of(node).phase}{' again' if node.meta['recomputed'] else ''}" for node in found.graph.nodes
    ]
    sorts: dict[_Row, list[Move]] = defaultdict(list)
    for move in plan.moves:
        sorts[_row(problem, phases, move)].append(move)
    waits = replay(problem, plan.moves).waits
    head = ("storages", "bytes", "away for", "waited for", "to", "from … to", "what")
    table = [head]
    largest = sorted(sorts.items(), key=lambda one: (-_bytes(problem, one[1]), str(one[0])))
    for row, moves in largest[:_SHOWN]:
        away = [_away(problem, move) for move in moves]
        table.append(
            (
                str(len(moves)),
                format_bytes(_bytes(problem, moves)),
                format_duration(sum(away) / len(away)),
                format_duration(sum(waits.get((move.storage, move.gap), 0.0) for move in moves)),
                row.space,
                f"{row.since} … {row.until}",
                row.what,
            )
        )
    widths = [max(len(cells[at]) for cells in table) for at in range(len(head) - 1)]
    lines += ["  ".join((*map(str.rjust, cells, widths), cells[-1])) for cells in table]
    if len(largest) > _SHOWN:
        others = [move for _, moves in largest[_SHOWN:] for move in moves]
        lines.append(f"and {len(others)} others, {format_bytes(_bytes(problem, others))} together")
    return "\n".join(lines)


def _row(problem: Problem, phases: list[str], move: Move) -> _Row:
    held, n = problem.by_storage[move.storage], problem.nodes
    first, last = held.gaps(n)[move.gap]
    name = pattern(held.name.removeprefix(f"{held.kind}."))
    until = phases[last % n] + (" of the next step" if last >= n else "")
    return _Row(f"{held.kind} {name}", move.space, phases[first - 1], until)


def _bytes(problem: Problem, moves: list[Move]) -> int:
    return sum(problem.by_storage[move.storage].bytes for move in moves)


def _away(problem: Problem, move: Move) -> float:
    """Seconds between leaving and being fetched, when nothing waits."""
    return problem.comes(move.fetch) - problem.comes(move.leave)
