"""Runs of neighbouring places, and an allocator of them: pages of a KV cache, bytes of the buffer of streamed weights.

A request's pages are one run where there is one that is long enough, so that attention reads keys and values as they
lie; else several runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Places `first` to `first + count - 1`."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.first + self.count


def runs_of(places: Sequence[int]) -> tuple[Run, ...]:
    """Places as runs, in their order."""
    runs: list[Run] = []
    for place in places:
        if runs and runs[-1].end == place:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(place, 1))
    return tuple(runs)


def rows_of(runs: Sequence[Run], page: int, first: int, end: int) -> list[slice]:
    """The rows of tokens `first` to `end - 1` of a request with these pages, a slice for each run."""
    found, start = [], 0
    for run in runs:
        tokens = run.count * page
        low, high = max(first - start, 0), min(end - start, tokens)
        if low < high:
            found.append(slice(run.first * page + low, run.first * page + high))
        start += tokens
    return found


class RunAllocator:
    """Allocator of runs in `size` places."""

    def __init__(self, size: int) -> None:
        self._free = [Run(0, size)] if size else []

    @property
    def free(self) -> int:
        """Places that are free."""
        return sum(run.count for run in self._free)

    @property
    def longest(self) -> int:
        """Places of the longest free run."""
        return max((run.count for run in self._free), default=0)

    def allocate(self, count: int, after: int | None = None) -> tuple[Run, ...] | None:
        """Runs of `count` places together; None where fewer are free. `after`: the place before them, if that can
        be."""
        if count > self.free:
            return None
        behind = next((run for run in self._free if after is not None and run.first == after + 1), None)
        if behind is not None and behind.count >= count:
            return (self._take(behind, count),)
        whole = self.allocate_run(count)
        if whole is not None:
            return (whole,)
        taken: list[Run] = []
        while count:
            longest = max(self._free, key=lambda run: run.count)
            taken.append(self._take(longest, min(count, longest.count)))
            count -= taken[-1].count
        return tuple(taken)

    def allocate_run(self, count: int, *, high: bool = False) -> Run | None:
        """The first run of `count` places, with `high` the last one; None where there is none."""
        runs = reversed(self._free) if high else self._free
        found = next((run for run in runs if run.count >= count), None)
        return None if found is None else self._take(found, count, high=high)

    def release(self, runs: Sequence[Run]) -> None:
        """Give runs back."""
        merged: list[Run] = []
        for run in sorted(filter(lambda run: run.count, (*self._free, *runs)), key=lambda run: run.first):
            assert not merged or run.first >= merged[-1].end, "a place was given back twice"
            if merged and merged[-1].end == run.first:
                merged[-1] = Run(merged[-1].first, merged[-1].count + run.count)
            else:
                merged.append(run)
        self._free = merged

    def _take(self, run: Run, count: int, *, high: bool = False) -> Run:
        first = run.end - count if high else run.first
        beside = (Run(run.first, first - run.first), Run(first + count, run.end - first - count))
        place = self._free.index(run)
        self._free[place : place + 1] = [one for one in beside if one.count]
        return Run(first, count)
