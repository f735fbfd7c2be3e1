"""Rows of a step dealt to data ranks and micro-batches, so that those that are computed at once are as much work.

Data ranks wait for each other in every micro-batch, in its collectives, and pad their rows to the longest of them. So a
step takes as long as

    Σ over micro-batches  of  rows · the longest row's positions  +  the most that a rank's encoders do

The best of four dealings by this sum: rows as given; sorted by work or by length, cut into micro-batches, and within
each dealt to the rank that has least; and rows joined to micro-batches of as much work each, whatever their lengths.
Rows are dealt most work first (LPT: Graham, *Bounds on Multiprocessing Timing Anomalies*, SIAM J. Appl. Math. 17(2),
1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowWork:
    """The work of a row, in positions of the language model."""

    positions: float
    encoder: float = 0.0
    """What encoders do for it."""

    @property
    def total(self) -> float:
        """Of both."""
        return self.positions + self.encoder


def dealt(work: Sequence[RowWork], ranks: int, micro: int) -> list[int]:
    """The places of the rows of a step in the order in which they are computed: rank after rank, each with its
    micro-batches of `micro` rows one after the other. Rows stay where they are if no dealing is shorter.

    >>> dealt([RowWork(9, images) for images in (1, 9, 1, 1, 9, 1, 1, 1)], ranks=2, micro=1)
    [1, 0, 3, 6, 4, 2, 5, 7]
    """
    if all(one == work[0] for one in work):
        return list(range(len(work)))
    dealer = _Dealer(work, ranks, micro)
    return min(dealer.dealings(), key=dealer.longest)


class _Dealer:
    def __init__(self, work: Sequence[RowWork], ranks: int, micro: int) -> None:
        self._work, self._ranks, self._micro = work, ranks, micro
        self._share = len(work) // ranks

    def longest(self, places: Sequence[int]) -> float:
        """How long the step takes, in positions."""
        total = 0.0
        for first in range(0, self._share, self._micro):
            beside = [
                [self._work[row] for row in places[at : at + self._micro]]
                for at in range(first, len(places), self._share)
            ]
            total += self._micro * max(row.positions for own in beside for row in own)
            total += max(sum(row.encoder for row in own) for own in beside)
        return total

    def dealings(self) -> Iterator[list[int]]:
        """The dealings that are compared."""
        yield list(range(len(self._work)))
        yield self._sorted(lambda one: one.total)
        yield self._sorted(lambda one: one.positions)
        yield self._joined()

    def _sorted(self, by: Callable[[RowWork], float]) -> list[int]:
        order = sorted(range(len(self._work)), key=lambda row: -by(self._work[row]))
        size = self._ranks * self._micro
        return self._written(
            self._bins(order[first : first + size], self._ranks, lambda one: one.encoder)
            for first in range(0, len(order), size)
        )

    def _joined(self) -> list[int]:
        order = range(len(self._work))
        bins = self._bins(order, len(self._work) // self._micro, lambda one: one.total)
        bins.sort(key=lambda own: -sum(self._work[row].total for row in own))
        return self._written(bins[at : at + self._ranks] for at in range(0, len(bins), self._ranks))

    def _bins(self, rows: Sequence[int], count: int, by: Callable[[RowWork], float]) -> list[list[int]]:
        """Rows in bins of a micro-batch each, which have nearly as much."""
        bins: list[list[int]] = [[] for _ in range(count)]
        # What each bin with room has, the least first.
        room = [(0.0, at) for at in range(count)]
        for row in sorted(rows, key=lambda row: -by(self._work[row])):
            held, at = heapq.heappop(room)
            bins[at].append(row)
            if len(bins[at]) < self._micro:
                heapq.heappush(room, (held + by(self._work[row]), at))
        return bins

    def _written(self, micro_batches: Iterator[list[list[int]]]) -> list[int]:
        """Each micro-batch's bins, one for each rank, as rank after rank."""
        found: list[list[int]] = [[] for _ in range(self._ranks)]
        for bins in micro_batches:
            for own, rows in zip(found, bins, strict=True):
                own += rows
        return [row for own in found for row in own]
