"""What moves where and when: a plan of a step's memory, and what it comes to in time.

Links are first in, first out, one for each direction of each space. A store is begun when the nodes before its place
have run, and a fetch likewise; the node at `leave` waits for the store, and the next one that uses the storage waits
for the fetch:

    begin(copy) = max(the host comes to its place, end of the copy before it on its link)
    node k starts when node k − 1 has ended and every copy that is waited for before it has
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.offload.problem import Problem


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that is away for (a part of) a gap between two uses.

    A place means "right before this node". busy[gap].last < store ≤ leave < fetch ≤ the first node of the next busy
    stretch. Of state the gap after the last stretch ends at the first one of the next step, at a place from n on.
    """

    storage: int
    space: str
    gap: int
    """It follows the busy stretch of this index."""
    store: int | None
    """Where the copy begins; None where the space holds what is in the storage already."""
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
    """Run two steps on paper; the second one counts, in which copies of the first may still be under way."""
    n = problem.nodes
    spaces = {space.name: space for space in problem.spaces}
    held = problem.by_storage
    begins: dict[int, list[tuple[int, Move, bool]]] = defaultdict(list)
    ends: dict[int, list[tuple[Move, bool]]] = defaultdict(list)
    for move in sorted(moves, key=lambda move: (move.leave, move.storage, move.gap)):
        if move.store is not None:
            begins[move.store % n].append((0, move, True))
            ends[move.leave % n].append((move, True))
        begins[move.fetch % n].append((1, move, False))
        ends[held[move.storage].gaps(n)[move.gap][1] % n].append((move, False))
    free: dict[tuple[str, bool], float] = defaultdict(float)
    over: dict[tuple[int, int, bool], float] = {}
    waits: dict[tuple[int, int], float] = {}
    now = since = stall = 0.0
    for _ in range(2):
        since, stall, waits = now, 0.0, {}
        for at in range(n):
            # A copy that begins and is waited for at one place is begun first.
            for _, move, out in begins.get(at, ()):
                space, count = spaces[move.space], held[move.storage].bytes
                link = (move.space, out)
                taken = (space.out if out else space.back).seconds(count)
                free[link] = over[move.storage, move.gap, out] = max(now, free[link]) + taken
            for move, out in ends.get(at, ()):
                late = over.get((move.storage, move.gap, out), 0.0) - now
                if late > 0:
                    stall += late
                    now += late
                    key = (move.storage, move.gap)
                    waits[key] = waits.get(key, 0.0) + late
            now += problem.starts[at + 1] - problem.starts[at]
    return Replayed(now - since, stall, waits)
