"""Live bytes at each node of a step that repeats, kept up to date (`trace.live_bytes` in incremental form).

A stretch of places `first` … `end` − 1 may continue in the next step (places from n on); since the step repeats, it
then wraps around to the first nodes. Changing or querying a stretch costs one pass over it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.offloading.schedule.array_types import Ints
from hyper_parallel.trace.live_bytes import wrapped


class LiveProfile:
    """Bytes at each node, in `at`: int64 [n], or float64 where bytes are a fluid."""

    __slots__ = ("at",)

    def __init__(self, at: NDArray[Any]) -> None:
        self.at = at

    def copy(self) -> LiveProfile:
        """One that changes by itself."""
        return LiveProfile(self.at.copy())

    def with_all(self, first: Ints, end: Ints, count: Ints) -> LiveProfile:
        """One with many stretches added at once: of each its first place, its end, and its bytes."""
        n = self.at.size
        change = np.zeros(2 * n + 1, dtype=self.at.dtype)
        np.add.at(change, first, count)
        np.subtract.at(change, end, count)
        more = np.cumsum(change[: 2 * n])
        return LiveProfile(self.at + more[:n] + more[n:])

    @property
    def peak(self) -> int:
        """The most bytes at any node."""
        return int(self.at.max(initial=0))

    def add(self, first: int, end: int, count: int) -> None:
        """Add `count` bytes to a stretch; where `end` lies before `first`, subtract them from end … first − 1."""
        if end < first:
            first, end, count = end, first, -count
        if end <= self.at.size:
            self.at[first:end] += count
            return
        for begin, stop in wrapped(first, end, self.at.size):
            self.at[begin:stop] += count

    def most(self, first: int, end: int) -> int:
        """The most bytes at a node of a stretch."""
        return max(int(self.at[a:z].max(initial=0)) for a, z in wrapped(first, end, self.at.size))

    def first_over(self, first: int, end: int, limit: int) -> int:
        """The first place of a stretch with more than `limit` bytes; its end where there is none."""
        if first >= end:
            return first
        for begin, stop in wrapped(first, end, self.at.size):
            over = self.at[begin:stop] > limit
            at = int(over.argmax())
            if over[at]:
                return first + at
            first += stop - begin
        return end

    def under_from(self, first: int, end: int, limit: int) -> int:
        """The first place of a stretch from which on, to its end, no node has more than `limit` bytes."""
        if first >= end:
            return end
        for begin, stop in reversed(wrapped(first, end, self.at.size)):
            over = self.at[begin:stop][::-1] > limit
            at = int(over.argmax())
            if over[at]:
                return end - at
            end -= stop - begin
        return first
