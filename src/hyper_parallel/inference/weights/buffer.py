"""The buffer of streamed weights: regions that live for one use, taken alternately from both ends.

Of modules that are used one after the other, each is placed at the lowest gap or at the highest in turn. With room for
any two neighbours, the one that computes and the one that is read always fit, however their sizes vary.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.inference.weights.units import ALIGN


@dataclass(frozen=True)
class Region:
    """Bytes `first` to `last - 1`."""

    first: int
    last: int


class StreamBuffer:
    """Which bytes of `size` are in use."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGN * ALIGN
        self._used: list[Region] = []
        self._high = False

    def take(self, count: int) -> Region | None:
        """A region of `count` bytes, a multiple of `ALIGN`; None where no gap has as many."""
        gaps = [
            Region(first, last)
            for first, last in zip(
                [0, *(one.last for one in self._used)],
                [*(one.first for one in self._used), self.size],
                strict=True,
            )
            if last - first >= count
        ]
        if not gaps:
            return None
        found = (
            Region(gaps[-1].last - count, gaps[-1].last)
            if self._high
            else Region(gaps[0].first, gaps[0].first + count)
        )
        self._high = not self._high
        self._used = sorted([*self._used, found], key=lambda one: one.first)
        return found

    def give(self, region: Region) -> None:
        """Give a region back."""
        self._used.remove(region)
