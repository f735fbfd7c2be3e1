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

    @property
    def bytes(self) -> int:
        """How many."""
        return self.last - self.first


class StreamBuffer:
    """Which bytes of `size` are in use."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGN * ALIGN
        self._used: list[Region] = []
        self._high = False

    def take(self, count: int, spare: int = 0) -> Region | None:
        """A region of `count` bytes, a multiple of `ALIGN`; None where no gap has as many, or where none of `spare`
        bytes is left then."""
        every = self._gaps()
        gaps = [gap for gap in every if gap.bytes >= count]
        if not gaps:
            return None
        found = (
            Region(gaps[-1].last - count, gaps[-1].last)
            if self._high
            else Region(gaps[0].first, gaps[0].first + count)
        )
        if spare and not self._leaves(every, found, spare):
            return None
        self._high = not self._high
        self._used = sorted([*self._used, found], key=lambda one: one.first)
        return found

    def _gaps(self) -> list[Region]:
        firsts, lasts = (
            [0, *(one.last for one in self._used)],
            [*(one.first for one in self._used), self.size],
        )
        return [Region(first, last) for first, last in zip(firsts, lasts, strict=True)]

    def _leaves(self, gaps: list[Region], taken: Region, spare: int) -> bool:
        """Whether a gap has `spare` bytes without a region at one of its ends."""
        return any(
            gap.bytes - (taken.bytes if gap.first <= taken.first < gap.last else 0) >= spare for gap in gaps
        )

    def give(self, region: Region) -> None:
        """Give a region back."""
        self._used.remove(region)
