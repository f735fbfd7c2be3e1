"""The order of the rows: a permutation for each epoch, and the rows of a step dealt to data ranks by their work.

Position p of epoch e holds row π(p), where π is a Feistel network (Luby and Rackoff 1988, "How to construct
pseudorandom permutations") over the smallest even number of bits that holds `length`, walked until it lands
below `length` (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3). A
Feistel network is a bijection whatever its round function, and a cycle walk of a bijection is one on the
smaller range; the domain is less than 4 · length, so that a walk takes fewer than 4 steps on average.

    round:  (L, R) → (R, L xor F_k(R))      `_feistel`, F_k the low bits of splitmix64(R xor k)
    keys:   k = BLAKE2b(seed, epoch), 64 bits a round      `_keys`
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Order:
    """The order in which rows are consumed: a pure function of (seed, length) and the number of rows consumed before.

    It does not depend on the workers or the batch size, so that both may change on resume; the number of consumed
    rows is the whole state. Every row comes once per epoch, and each epoch has another order.
    """

    def __init__(self, seed: int, length: int) -> None:
        """`length`: the number of rows, at least 1. Raises ValueError for fewer."""
        if length < 1:
            raise ValueError(f"an order needs at least one row, got {length}")
        self.seed = seed
        self.length = length
        self._half = max(1, ((length - 1).bit_length() + 1) // 2)

    def rows(self, consumed: int, count: int) -> list[int]:
        """The next `count` rows after the first `consumed` ones, each in [0, length); crosses epochs as
        needed."""
        assert min(consumed, count) >= 0, f"{consumed} consumed, {count} wanted"
        found: list[int] = []
        while len(found) < count:
            epoch, start = divmod(consumed + len(found), self.length)
            stop = min(self.length, start + count - len(found))
            found += self._permute(epoch, np.arange(start, stop, dtype=np.uint64)).tolist()
        return found

    def _permute(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        keys = self._keys(epoch)
        rows = self._feistel(positions, keys)
        while (outside := rows >= self.length).any():
            rows[outside] = self._feistel(rows[outside], keys)
        return rows

    def _keys(self, epoch: int) -> NDArray[np.uint64]:
        name = f"{self.seed} {epoch}".encode()
        return np.frombuffer(hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest(), dtype="<u8")

    def _feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_splitmix(right ^ key) & mask)
        return (left << half) | right


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea and Flood 2014), modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Rows of a step dealt to data ranks and micro-batches, so that those that are computed at once are as much work.
#
# Data ranks wait for each other in every micro-batch, in its collectives, and pad their rows to the longest of them. So
# a step takes as long as
#
#     Σ over micro-batches  of  rows · the longest row's positions  +  the most that a rank's encoders do
#
# The best of four dealings by this sum: rows as given; sorted by work or by length, cut into micro-batches, and within
# each dealt to the rank that has least; and rows joined to micro-batches of as much work each, whatever their lengths.
# Rows are dealt most work first (LPT: Graham, *Bounds on Multiprocessing Timing Anomalies*, SIAM J. Appl. Math. 17(2),
# 1969).


@dataclass(frozen=True, slots=True)
class RowWork:
    """The work of a row, in positions of the language model."""

    positions: float
    encoder: float = 0.0
    """What encoders do for it."""

    @property
    def total(self) -> float:
        """The sum of both."""
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
