"""Few lengths of rows inside another trainer: plans are made for shapes, and rows of a trainer have many lengths.

All ranks pad to the longest row of any of them, and further, to one of few lengths:

    known length if one is at least n and at most 1.5 · n, else the next of 2^k and 1.5 · 2^k;
    once MOST lengths are known, the least of them that is at least n

The first length is taken as it is: rows that are all of one length are not padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.row_length import length_multiple

MOST = 8
"""Lengths from which on no shorter one is added."""


class FewLengths:
    """The lengths to which the ranks of a model have padded rows so far."""

    def __init__(self, handle: ShardedModel, known: Sequence[int] = ()) -> None:
        """`known`: lengths for which there are plans already."""
        self._handle, self.known = handle, list(known)

    def length(self, longest: int) -> int:
        """To how many positions rows of at most `longest` are padded now, the same on every rank; a collective.

        A multiple of what the axes can divide.
        """
        told = torch.tensor([longest], dtype=torch.int64, device=self._handle.device)
        wanted = int(self._handle.over_all_ranks(told, "max"))
        found = length_of(wanted, self.known, length_multiple(self._handle.plan))
        if found not in self.known:
            self.known.append(found)
        return found


def length_of(wanted: int, known: Sequence[int], multiple: int = 1) -> int:
    """The module's rule, for `wanted` positions when these lengths are `known`; a multiple of `multiple`."""
    rounded = -(-wanted // multiple) * multiple
    fits = [length for length in known if length >= rounded]
    if fits and (min(fits) <= 1.5 * rounded or len(known) >= MOST):
        return min(fits)
    if not known:
        return rounded
    power = 1 << (rounded - 1).bit_length()
    step = power * 3 // 4 if rounded <= power * 3 // 4 else power
    return -(-step // multiple) * multiple
