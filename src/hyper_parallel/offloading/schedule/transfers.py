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

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """Live bytes at the worst moment, exactly."""
    seconds: float
    """Foreseen, of a step (`replay`)."""
    stall: float
    floor: int
    """The least budget that this planner can meet."""
    working_set: int
    """The least budget that any planner could meet."""


def replay(problem: Problem, moves: Iterable[Move]) -> Replayed:
    """Run steps on paper until they repeat, since copies of one may still be under way in the next; the mean of those
    that repeat counts, or the last one where none did in `_STEPS`."""
    n = problem.nodes
    spaces = {space.name: space for space in problem.spaces}
    # By place: (how soon it is waited for, storage, copy, link, seconds), and the copies that are waited for.
    stores: dict[int, list[_Begin]] = defaultdict(list)
    fetches: dict[int, list[_Begin]] = defaultdict(list)
    updates = {update.place: update for update in problem.updates}
    leaves: dict[int, list[_Copy]] = defaultdict(list)
    uses: dict[int, list[_Copy]] = defaultdict(list)
    for move in moves:
        held, space = problem.by_storage[move.storage], spaces[move.space]
        copy = (move.storage, move.gap, True)
        if move.store is not None:
            taken = space.out.seconds(held.bytes)
            stores[move.store % n].append(
                (move.leave - move.store, move.storage, copy, (space.name, True), taken)
            )
            leaves[move.leave % n].append(copy)
        gaps = held.gaps(n)
        if move.gap == len(gaps) - 1 and not held.returns:
            continue
        copy, used = (move.storage, move.gap, False), gaps[move.gap][1]
        taken = space.back.seconds(held.bytes)
        fetches[move.fetch % n].append((used - move.fetch, move.storage, copy, (space.name, False), taken))
        uses[used % n].append(copy)
    for begun in (*stores.values(), *fetches.values()):
        begun.sort()
    for waited in (*leaves.values(), *uses.values()):
        waited.sort()
    places = sorted({*stores, *leaves, *fetches, *uses, *updates})
    last = {held.storage: len(held.gaps(n)) - 1 for held in problem.held if held.must is not None}
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
        late_by: list[float] = []
        for at in places:
            clock.now = since + problem.comes(at) + stall
            for begins, ends in ((stores, leaves), (fetches, uses)):
                for _, _, copy, link, taken in begins.get(at, ()):
                    over[copy] = clock.begin(link, taken, worked.get(copy, 0.0))
                for copy in ends.get(at, ()):
                    late = clock.wait(over.get(copy, 0.0))
                    if late > 0:
                        stall += late
                        waits[copy[:2]] = waits.get(copy[:2], 0.0) + late
            late_by.append(stall)
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
    arrives, starts = _stretched(problem.starts, places, late_by)
    return Replayed(seconds, max(0.0, seconds - step), waits, arrives, starts)


def _stretched(
    starts: Sequence[float], places: list[int], late_by: list[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When the host comes to each node and when it starts: `late_by` are the stalls up to each of the places."""
    arrives: list[float] = []
    begins: list[float] = []
    before, first = 0.0, 0
    for place, late in zip([*places, len(starts)], [*late_by, 0.0], strict=True):
        between = [start - starts[0] + before for start in starts[first:place]]
        arrives += between
        begins += between
        if place < len(starts):
            at = starts[place] - starts[0]
            arrives.append(at + before)
            begins.append(at + late)
            before, first = late, place + 1
    return tuple(arrives), tuple(begins)


_UPDATES = ("", True)
"""The queue of the host's updates, beside those of the links: (space, whether copies go out to it)."""
_Copy = tuple[int, int, bool]
"""Storage, gap, and whether it goes out."""
_Begin = tuple[int, int, _Copy, tuple[str, bool], float]
