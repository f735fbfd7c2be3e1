"""Arena offsets (dynamic storage allocation): storages that are live together never overlap.

    size ≥ peak = max over k of Σ bytes of the lives that hold k, each rounded up to `align`

Finding the least size is NP-hard (dynamic storage allocation). All lives are known beforehand, so that they need not be
placed in the order in which they begin. Each is put as low as it fits over the whole of its life (`_place`), a greedy
like that of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (arXiv 2001.03288), in
several orders: the longest first, which stacks what is nested as forward and backward are; the largest first; by
bytes × length. After each, what sticks out above the peak is moved to the front of the order and all is placed again,
until nothing sticks out or the rounds are over. Rounds are counted and not timed: the same lives have the same offsets
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Ints
from hyper_parallel.offloading.schedule.live_profile import LiveProfile

EFFORT = 40_000
"""Lives that are placed in all rounds together; there are at least 4 rounds and at most 64."""


@dataclass(frozen=True)
class Packed:
    """Where lives lie in an arena."""

    offsets: tuple[int, ...]
    """Bytes, in the order of the lives; multiples of the alignment."""
    size: int
    """Bytes of the arena."""
    peak: int
    """Bytes alive at the worst moment, each life rounded up: no arena is smaller."""


def pack(lives: Sequence[tuple[int, int, int]], align: int = 512) -> Packed:
    """Offsets of lives (first, last, bytes), both places inclusive.

    A life whose first place lies behind its last one goes on in the next round: it is alive from `first` to the end and
    from the beginning to `last`. Lives without bytes lie at 0.

    Raises ValueError for a negative number of bytes or place, or an alignment that is not positive.
    """
    if align < 1:
        raise ValueError(f"an alignment of {align} bytes; it must be at least 1")
    table = np.asarray(lives, dtype=np.int64).reshape(len(lives), 3)
    if table.size and table.min() < 0:
        raise ValueError("a life has a negative place or number of bytes")
    first, last, sizes = table.T
    sizes = (sizes + align - 1) // align * align
    offsets = np.zeros(len(lives), dtype=np.int64)
    some = np.flatnonzero(sizes)
    if not some.size:
        return Packed(tuple(offsets.tolist()), 0, 0)
    arena = _Arena(first[some], last[some], sizes[some])
    offsets[some], size = arena.search()
    return Packed(tuple(offsets.tolist()), size, arena.peak)


class _Arena:
    """Lives that are to be placed. One that goes around the end has two stretches; the others' second one is empty."""

    def __init__(self, first: Ints, last: Ints, sizes: Ints) -> None:
        end = int(max(first.max(), last.max())) + 1
        around = first > last
        self.sizes = sizes
        self.first, self.last = first, np.where(around, end - 1, last)
        self.again = np.where(around, last, -1)
        """Last place of the stretch from 0 on."""
        live = LiveProfile(np.zeros(end, dtype=np.int64)).with_all(
            first, np.where(around, end + last, last) + 1, sizes
        )
        self.peak = live.peak
        self.length = self.last - self.first + 1 + self.again + 1

    def search(self) -> tuple[Ints, int]:
        """The smallest arena found."""
        number = np.arange(self.sizes.size)
        long, large = (np.frexp(of)[1] for of in (self.length, self.sizes))  # to a power of two
        orders = (
            np.lexsort((number, -self.length, -self.sizes, -long)),
            np.lexsort((number, -self.sizes, -self.length, -large)),
            np.lexsort((number, -self.sizes * self.length)),
        )
        rounds = min(64, max(4, EFFORT // self.sizes.size))
        offsets, size = number, 0
        for order, share in zip(orders, (rounds // 2, rounds // 4, rounds // 4), strict=True):
            now = order
            for _ in range(share):
                at = self._place(now)
                found = int((at + self.sizes).max())
                if not size or found < size:
                    size, offsets = found, at
                if size == self.peak:
                    return offsets, size
                sticks_out = (at + self.sizes > self.peak)[now]
                now = np.concatenate([now[sticks_out], now[~sticks_out]])
        return offsets, size

    def _place(self, order: Ints) -> Ints:
        """Each in turn into the lowest hole that it fits."""
        count = order.size
        offsets = np.zeros(count, dtype=np.int64)
        # What is placed, by ascending offset: first, last, again, offset, end.
        placed = np.empty((5, count), dtype=np.int64)
        for filled, one in enumerate(order):
            first, last, again, size = self.first[one], self.last[one], self.again[one], self.sizes[one]
            firsts, lasts, agains, begins, ends = placed[:, :filled]
            meets = (firsts <= last) & (lasts >= first) | (agains >= first)
            if again >= 0:
                meets |= (firsts <= again) | (agains >= 0)
            begin, end = begins[meets], ends[meets]
            offset = 0
            if begin.size:
                below = np.maximum.accumulate(end)
                holes = begin.copy()
                holes[1:] -= below[:-1]
                hole = int((holes >= size).argmax())
                if holes[hole] < size:
                    offset = int(below[-1])
                elif hole:
                    offset = int(below[hole - 1])
            offsets[one] = offset
            at = int(np.searchsorted(begins, offset, side="right"))
            placed[:, at + 1 : filled + 1] = placed[:, at:filled]
            placed[:, at] = (first, last, again, offset, offset + size)
        return offsets
