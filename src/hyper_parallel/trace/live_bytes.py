"""Live bytes: how many bytes are alive over time, and their peak.

    live(t) = Σ bytes of the lifetimes that hold t,   first ≤ t < end                                 `profile`
    peak    = max over t of live(t), and the first t at which it is reached                           `peak`

A lifetime adds its bytes at `first` and takes them off at `end` (a difference array); the running sum of these changes
is live(t). Moments are whatever can be ordered: places of nodes, seconds, counts of operators.

Everything that counts live bytes counts here: the storages of a graph (`graph.liveness`), the buffers of an offload
problem (`offloading.schedule.problem`), the slots of an arena, the spans of a Timeline, and the storages that a tracker
saw. Schedulers that allocate and free as they go use `LiveBytes`; the offload solver, which shifts transfers thousands
of times, keeps a profile up to date (`offloading.schedule.idle_intervals`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Protocol, TypeVar


class Moment(Protocol):
    """What can be ordered."""

    def __lt__(self, other: Any, /) -> bool: ...


T = TypeVar("T", bound=Moment)


def profile(lifetimes: Iterable[tuple[int, int, int]], moments: int) -> list[int]:
    """Live bytes at each of the moments 0 … `moments` − 1, of lifetimes (first, end, bytes) within 0 … `moments`.

    A lifetime with negative bytes is an absence: of a storage that is elsewhere meanwhile.

    >>> profile([(0, 3, 10), (1, 2, 5)], 4)
    [10, 15, 10, 0]
    """
    change = [0] * (moments + 1)
    for first, end, count in lifetimes:
        change[first] += count
        change[end] -= count
    return list(accumulate(change))[:moments]


def peak(lifetimes: Iterable[tuple[T, T, int]]) -> tuple[int, T | None]:
    """The most bytes alive at once, of lifetimes (first, end, bytes), and the first moment at which they are.

    The moment is None where nothing ever has bytes.

    >>> peak([(0.0, 2.0, 10), (0.5, 1.0, 5), (1.0, 3.0, 5)])
    (15, 0.5)
    """
    changes: dict[T, int] = {}
    for first, end, count in lifetimes:
        changes[first] = changes.get(first, 0) + count
        changes[end] = changes.get(end, 0) - count
    live, at = LiveBytes(), None
    for moment in sorted(changes):
        if live.add(changes[moment]):
            at = moment
    return live.most, at


def wrapped(first: int, end: int, nodes: int) -> tuple[tuple[int, int], ...]:
    """A stretch of places of two steps as stretches of one.

    >>> wrapped(3, 7, 5)
    ((3, 5), (0, 2))
    """
    if end <= nodes:
        return ((first, end),)
    if first >= nodes:
        return ((first - nodes, end - nodes),)
    return ((first, nodes), (0, end - nodes))


class LiveBytes:
    """The running sum, for whoever comes from one change to the next."""

    __slots__ = ("alive", "most")

    def __init__(self, alive: int = 0) -> None:
        self.alive = alive
        """Bytes alive now."""
        self.most = alive
        """Bytes that were alive at most."""

    def add(self, count: int) -> bool:
        """Add `count` bytes (negative: free them); whether this is a new maximum."""
        self.alive += count
        if self.alive <= self.most:
            return False
        self.most = self.alive
        return True
