"""The order of the rows: a permutation for each epoch, computed by a Feistel network and never stored.

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
