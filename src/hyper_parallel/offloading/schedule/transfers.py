"""Transfers: an offload plan, and its simulated step time (`replay`).

Links are first in, first out, one for each direction of each space. A store is begun when the nodes before its place
have run, and a fetch likewise; the node at `leave` waits for the store, and the next one that uses the storage waits
for the fetch. A store need not wait until its storage is idle: it may begin as soon as what it copies is final.

    begin(copy) = max(the host comes to its place, end of the copy before it on its link, end of an update of its slot)
    begin(update) = max(the host comes to its node, end of the update before it, end of the copy of its gradient)
    node k starts when node k − 1 has ended and every copy that is waited for before it has

Right before a node the host begins stores, waits for the stores of what leaves, begins fetches (whose memory may have
been given up just before) and waits for what the node uses. Of copies that begin at one place, the one that is waited
for first goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.simulator.queue_clock import QueueClock

_STEPS = 16
_NOTHING = 1e-12
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that is away for (a part of) a gap between two uses.

    A place means "right before this node". busy[gap].last < leave < fetch ≤ the first node of the next busy stretch,
    and open ≤ store ≤ leave (`Held.opens`). Of state the gap after the last stretch ends at the first one of the next
    step, at a place from n on, and a store that begins in the step before does so at a negative place.
    """

    storage: int
    space: str
    gap: int
    """It follows the busy stretch of this index."""
    store: int | None
    """Where the copy begins, perhaps while the storage is read still; None where the space holds what is in it."""
    leave: int
    """Where the storage's memory is given up, the copy waited for."""
    fetch: int
    """Where the memory is taken again and the copy back begins. It is waited for right before the next use."""


STORE, LEAVE, FETCH, USE = range(4)
"""What moves do right before a node, in this order: a store begins, what leaves waits for its store, a fetch begins,
and what the node uses is waited for."""


class Event(NamedTuple):
    """Something that a move does right before a node. Events are sorted in the order in which they happen."""

    place: int
    """Of this step."""
    turn: int
    soon: int
    """Of a copy that begins: nodes until it is waited for. The most urgent goes first."""
    storage: int
    gap: int
    space: str


def events_of(problem: Problem, move: Move) -> Iterator[Event]:
    """What a move does in a step; without a fetch where nothing comes back."""
    n, held = problem.nodes, problem.by_storage[move.storage]
    gaps, what = held.gaps(n), (move.storage, move.gap, move.space)
    used = gaps[move.gap][1]
    if move.store is not None:
        yield Event(move.store % n, STORE, move.leave - move.store, *what)
    yield Event(move.leave % n, LEAVE, 0, *what)
    if held.returns or move.gap < len(gaps) - 1:
        yield Event(move.fetch % n, FETCH, used - move.fetch, *what)
        yield Event(used % n, USE, 0, *what)


@dataclass(frozen=True)
class Replayed:
    """What a plan comes to, step after step."""

    seconds: float
    """Of a step."""
    stall: float
    """Of it, seconds in which nodes wait for copies."""
    waits: dict[tuple[int, int], float]
    """(storage, gap) to the seconds that its copies are waited for, where there are any."""
    arrives: tuple[float, ...]
    """Seconds into the step at which the host comes to each node; one more: the step's end."""
    starts: tuple[float, ...]
    """Those at which each node starts, once what it waits for is over; one more: the step's end."""


@dataclass(frozen=True)
class Plan:
    """The moves of a step, in the order of (place, storage)."""

    moves: tuple[Move, ...]
    peak: int
    """The most live bytes, exactly."""
    seconds: float
    """Predicted seconds of a step (`replay`)."""
    stall: float
    """Seconds of them in which nodes wait for copies."""
    floor: int
    """The least budget that this planner can meet."""
    working_set: int
    """The least budget that any planner could meet."""


def replay(problem: Problem, moves: Iterable[Move]) -> Replayed:
    """Run steps on paper until they repeat, since copies of one may still be under way in the next; the mean of those
    that repeat counts, or the last one where none did in `_STEPS`."""
    links = {space.name: (space.back, space.out) for space in problem.spaces}
    at_place: dict[int, list[tuple[bool, _Copy, tuple[str, bool], float]]] = {}
    """By place, in their order: whether it begins, copy, link, seconds."""
    for event in sorted(event for move in moves for event in events_of(problem, move)):
        place, turn, _, storage, gap, space = event
        out, begins = turn <= LEAVE, turn in (STORE, FETCH)
        taken = links[space][out].seconds(problem.by_storage[storage].bytes) if begins else 0.0
        at_place.setdefault(place, []).append((begins, (storage, gap, out), (space, out), taken))
    updates = {update.place: update for update in problem.updates}
    todo = [(at, problem.comes(at), at_place.get(at, ())) for at in sorted({*at_place, *updates})]
    last = {held.storage: len(held.gaps(problem.nodes)) - 1 for held in problem.held if held.must is not None}
    worked: dict[_Copy, float] = {}
    """When the host has done what a copy brings back."""
    over: dict[_Copy, float] = {}
    clock: QueueClock[tuple[str, bool]] = QueueClock()
    step = problem.seconds
    end, seconds = 0.0, step
    # What is still under way when a step begins, as seconds that it will take, decides how it goes.
    seen: list[tuple[float, dict[_Copy, float]]] = [(0.0, {})]
    while len(seen) <= _STEPS:
        since, stall = end, 0.0
        waits: dict[tuple[int, int], float] = {}
        late_by: dict[int, float] = {}
        for at, comes, events in todo:
            clock.now = now = since + comes + stall
            for begins, copy, link, taken in events:
                if begins:
                    over[copy] = clock.begin(link, taken, worked.get(copy, 0.0))
                elif over.get(copy, 0.0) > now:
                    stall += (late := clock.wait(over[copy]))
                    now = clock.now
                    waits[copy[:2]] = waits.get(copy[:2], 0.0) + late
            late_by[at] = stall
            if at in updates:
                update = updates[at]
                gradient = (update.gradient, last[update.gradient], True)
                done = clock.begin(_UPDATES, update.seconds, over.get(gradient, 0.0))
                worked[update.parameter, last[update.parameter], False] = done
        end = since + step + stall
        left = {
            copy: round(until - end, 12)
            for times in (worked, over)
            for copy, until in times.items()
            if until - end > _NOTHING
        }
        known = next((at for at, (_, before) in enumerate(seen) if before == left), None)
        if known is not None:
            seconds = (end - seen[known][0]) / (len(seen) - known)
            break
        seen.append((end, left))
        seconds = end - since
    arrives, starts = _stretched(problem.starts, late_by)
    return Replayed(seconds, max(0.0, seconds - step), waits, arrives, starts)


def _stretched(
    starts: Sequence[float], late_by: dict[int, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When the host comes to each node and when it starts: `late_by` are the stalls up to each place that has any."""
    arrives: list[float] = []
    begins: list[float] = []
    late = 0.0
    for place, start in enumerate(starts):
        arrives.append(start - starts[0] + late)
        late = late_by.get(place, late)
        begins.append(start - starts[0] + late)
    return tuple(arrives), tuple(begins)


_UPDATES = ("", True)
"""The queue of the host's updates, beside those of the links: (space, whether copies go out to it)."""
_Copy = tuple[int, int, bool]
"""Storage, gap, and whether it goes out."""
