"""Cached values that a layer computes with before attention: latents, which MLA expands to keys and values of heads.

Where a layer is linear in them, token by token, the matrices are found by giving it unit vectors in place of cached
rows: what it makes of them are matrices A of keys and B of values. Attention to expanded latents L is then
softmax((q A^T) L^T) L B (DeepSeek-V2, section 2.1.2), and contexts need not be expanded. Other layers, and the
segments of a pass with many rows, for which expanding takes less, are given all rows of their contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.inference.ragged_pass import BLOCK, Segment, pass_rows

ABSORBED_ROWS = 64
"""Rows of a segment up to which matrices are absorbed. A context of S tokens takes S · R · (Dk + Dv) products a head to
expand, and a row of queries about 2 · S · R more in latents: R = 512, Dk = 192 and Dv = 128 break even at 160 rows of
DeepSeek-V3."""
_NEARLY = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Rounding of a product, by dtype; 3e-2 for narrower ones."""

Read = Callable[[Segment], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Matrices:
    """What a layer multiplies cached values by: the first R1 rows belong to the first one, the others to the second."""

    keys: Tensor
    """[H, R1 + R2, Dk]."""
    values: Tensor
    """[H, R1 + R2, Dv]."""
    first: int
    """R1."""
    one_in_values: bool
    """Whether values depend on the first one only."""


class Latents:
    """Of one layer. A pass calls `given`, the layer computes, then attention calls `learn` and `whole`."""

    def __init__(self, *, absorb: bool, keep: bool) -> None:
        """`keep`: matrices are found once, and not in every pass: for weights that stay the same."""
        self.linear: bool | None = None if absorb else False
        """Whether the layer is linear in what it cached; None until that was tried."""
        self._keep = keep
        self._kept: Matrices | None = None
        self._one_in_values: bool | None = None
        self._units: tuple[Tensor, Tensor] | None = None
        self._whole: dict[int, slice] = {}
        self._rows = 0

    def given(
        self, first: Tensor, second: Tensor, segments: Sequence[Segment], read: Read
    ) -> tuple[Tensor, Tensor]:
        """What the layer computes with, [1, H, rows, R1] and [1, H, rows, R2]: unit vectors where matrices are to be
        found, then all rows of contexts that are expanded. `first` and `second`: the rows of the pass itself."""
        if first.size(1) != 1 or second.size(1) != 1:
            self.linear = False
        self._units = None
        if self.linear is not False and self._kept is None:
            self._units = _unit_vectors(first, second)
        whole = [one for one in segments if self.linear is False or one.count > ABSORBED_ROWS]
        end = 0 if self._units is None else self._units[0].size(2)
        # Never without rows, which some models' views do not take.
        self._rows = pass_rows(end + sum(one.end for one in whole), BLOCK)
        given = tuple(x.new_zeros(1, x.size(1), self._rows, x.size(3)) for x in (first, second))
        if self._units is not None:
            for all_, part in zip(given, self._units, strict=True):
                all_[:, :, :end] = part
        self._whole = {}
        for segment in whole:
            # One after the other: what is read may lie in staging buffers.
            for all_, context in zip(given, read(segment), strict=True):
                all_[:, :, end : end + segment.end] = context
            self._whole[segment.start] = slice(end, end + segment.end)
            end += segment.end
        return given[0], given[1]

    def learn(self, keys: Tensor, values: Tensor) -> Matrices | None:
        """The matrices, from what the layer made of `given`: [1, H, rows, Dk] and [1, H, rows, Dv]. None for a layer
        that is not linear, and needs all contexts."""
        if self._kept is not None or self._units is None:
            return self._kept
        (first, second), self._units = (x[0, 0] for x in self._units), None
        count = first.size(1) + second.size(1)
        found = [x[0, :, :count].contiguous() for x in (keys, values)]
        if self.linear is None:
            row = torch.cat([first[-1], second[-1]])
            made = (x[0, :, count] for x in (keys, values))
            self.linear = all(_is_product(row, matrix, x) for matrix, x in zip(found, made, strict=True))
        if not self.linear:
            return None
        if self._one_in_values is None:
            self._one_in_values = not bool(found[1][:, first.size(1) :].any())
        matrices = Matrices(found[0], found[1], first.size(1), self._one_in_values)
        self._kept = matrices if self._keep else None
        return matrices

    @property
    def rows(self) -> int:
        """Of what was given."""
        return self._rows

    def whole(self, segment: Segment) -> slice | None:
        """A segment's context among the rows that were given; None where matrices are absorbed."""
        return self._whole.get(segment.start)


def _unit_vectors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, R1 + R2 + 1, R1] and [1, 1, R1 + R2 + 1, R2]: unit vectors of both together, and a random vector."""
    sizes = first.size(3), second.size(3)
    count = sum(sizes)
    drawn = torch.randn(1, count, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.eye(count), drawn]).to(first.device, first.dtype)
    one, other = rows.split(sizes, 1)
    return one[None, None], other[None, None]


def _is_product(row: Tensor, matrices: Tensor, found: Tensor) -> bool:
    """Whether found [H, D] is row [R] @ matrices [H, R, D], but for rounding."""
    expected = row.float() @ matrices.float()
    bound = row.float().abs() @ matrices.float().abs()
    far = (found.float() - expected).abs() - _NEARLY.get(found.dtype, 3e-2) * bound
    return bool((far <= 0).all())
