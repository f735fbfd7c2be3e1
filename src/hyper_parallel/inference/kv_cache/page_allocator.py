"""Page allocation: contiguous runs of KV cache pages, first fit.

A request's pages are one run where there is one that is long enough, so that attention reads keys and values as they
lie; else several runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Pages `first` to `first + count - 1`."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The page behind it."""
        return self.first + self.count


class PageAllocator:
    """Which of `pages` pages are free."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = [Run(0, pages)] if pages else []

    @property
    def free(self) -> int:
        """Pages that are free."""
        return sum(run.count for run in self._free)

    def allocate(self, count: int, after: int | None = None) -> tuple[Run, ...] | None:
        """Runs of `count` pages together; None where fewer are free. `after`: the page before them, if that can be."""
        if count > self.free:
            return None
        if after is not None:
            behind = next((run for run in self._free if run.first == after + 1), None)
            if behind is not None and behind.count >= count:
                return (self._take(behind, count),)
        whole = next((run for run in self._free if run.count >= count), None)
        if whole is not None:
            return (self._take(whole, count),)
        taken: list[Run] = []
        while count:
            longest = max(self._free, key=lambda run: run.count)
            taken.append(self._take(longest, min(count, longest.count)))
            count -= taken[-1].count
        return tuple(taken)

    def release(self, runs: tuple[Run, ...]) -> None:
        """Give runs back that `allocate` returned."""
        merged: list[Run] = []
        for run in sorted([*self._free, *runs], key=lambda run: run.first):
            assert not merged or run.first >= merged[-1].end, "a page was given back twice"
            if merged and merged[-1].end == run.first:
                merged[-1] = Run(merged[-1].first, merged[-1].count + run.count)
            else:
                merged.append(run)
        self._free = merged

    def _take(self, run: Run, count: int) -> Run:
        place = self._free.index(run)
        rest = Run(run.first + count, run.count - count)
        self._free[place : place + 1] = [rest] if rest.count else []
        return Run(run.first, count)
