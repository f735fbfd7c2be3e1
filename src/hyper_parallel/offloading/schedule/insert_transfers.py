"""Inserts a plan's transfers into the graph as tier operators.

Right before a node stand, in this order: the stores that begin there; of what leaves there the wait for its store and
the `detach`; the prefetches, which take memory that was given up just before; the waits for what the node uses. An
update on the host is given the slots of its storages; the state that only it needs rests in them for good.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import fx

from hyper_parallel.graph import Slot, StepGraph, tier_ops, validate
from hyper_parallel.graph.host_update import is_update, slot_arguments, storages_of, tier_of
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.tier_ops import Rest
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.transfers import FETCH, LEAVE, STORE, USE, Event, Move, events_of

_Operator = Callable[..., object]
_OPERATORS: dict[int, tuple[_Operator, ...]] = {
    STORE: (tier_ops.store,),
    LEAVE: (tier_ops.wait, tier_ops.detach),
    FETCH: (tier_ops.prefetch,),
    USE: (tier_ops.wait,),
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
    made = step.copy()
    nodes = list(made.nodes)
    events = sorted(event for move in moves for event in events_of(problem, move))
    numbers: dict[tuple[int, str], int] = {}
    updates = [(at, node) for at, node in enumerate(nodes) if is_update(node)]
    worked_on = [(storage, tier_of(node)) for _, node in updates for storage in storages_of(node)]
    for place in (*((event.storage, event.space) for event in events), *worked_on):
        if place not in numbers:
            number = (known or {}).get(place)
            numbers[place] = first if number is None else number
            first += number is None
    made.slots = _slots(made, problem, events, numbers)
    for _, node in updates:
        slot_arguments(node, tuple(numbers[storage, tier_of(node)] for storage in storages_of(node)))
    names = _names(made)
    for event in events:
        after = nodes[event.place]
        for operator in _OPERATORS[event.turn]:
            with made.graph.inserting_before(after):
                slot = numbers[event.storage, event.space]
                moved = made.graph.call_function(operator, (names[event.storage], slot, event.space))
            moved.meta = {**{key: after.meta[key] for key in ("region", "module")}, "recomputed": False}
    validate(step, made)
    return made


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
    """Of each storage the first node that gives a value in it, by which cache operators name it."""
    found: dict[int, fx.Node] = {}
    for node in (*step.placeholders, *step.nodes):
        value = node.meta.get("value")
        if isinstance(value, Value):
            found.setdefault(value.storage, node)
    return found
