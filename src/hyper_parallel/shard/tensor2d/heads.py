"""From products that are partial over tensor_x to whole heads, and back.

Each rank of tensor_x has a term of all the heads that its rank of tensor_y computes. A reduce-scatter along
the features gives each one its own heads, whole. Where there are fewer key-value heads than ranks, it gives each one
an equal stretch of a head's positions, and the ranks that attend with the head put it together: less than sending
each of them all of it. The permutation that brings the heads of a rank together is the only copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.tensor2d.types import FEATURES, SEQUENCE


@dataclass(frozen=True)
class ScatterHeads:
    """[B, S, F] partial over `x` to [B, S, heads of this rank]: the parts of F side by side, each on its own."""

    x: Axis
    parts: tuple[int, ...]
    """The features of the parts, on each rank of tensor_y."""
    shared: tuple[bool, ...]
    """Whether ranks share the heads of a part: as many as `sharing` has."""
    sharing: Axis
    size: int
    """Features of a head."""

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        if self.x.size == 1:
            return partial
        if not any(self.shared) or self.sharing.size == 1:
            return self.x._move(self._scatter, self._gather, partial)
        # A query, if the projection has one, comes first; keys and values are alike.
        own = sum(length for length, shared in zip(self.parts, self.shared, strict=True) if not shared)
        both = partial[..., own:]
        mine = self.sharing.gather_sum(
            self.x._move(self._scatter_shared, self._gather_shared, both), SEQUENCE
        )
        if not own:
            return mine
        query = self.x._move(self._scatter, self._gather, partial[..., :own])
        return torch.cat([query, mine], FEATURES)

    # Whole heads for each rank.

    def _own(self) -> list[int]:
        return [length for length, shared in zip(self.parts, self.shared, strict=True) if not shared]

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        pieces = [
            part.unflatten(-1, (n, part.size(-1) // n)).movedim(-2, 0)
            for part in partial.split(self._own(), -1)
        ]
        rows = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, -1)
        return self.x._reduce_scatter_rows(rows.flatten(0, 1))

    def _gather(self, gradient: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        rows = self.x._gather_rows(gradient).unflatten(0, (n, gradient.size(0)))
        pieces = rows.split([length // n for length in self._own()], -1)
        if len(pieces) == 1:
            whole: torch.Tensor = rows.movedim(0, -2).reshape(*gradient.shape[:-1], -1)
            return whole
        return torch.cat([row for piece in pieces for row in piece.unbind(0)], -1)

    # Heads that several ranks share: [B, S, k·heads·size] and [heads·r, B, S / r, k·size], with r ranks to a head
    # and k = 2 where keys and values come together.

    def _scatter_shared(self, partial: torch.Tensor) -> torch.Tensor:
        r, k = self.sharing.size, sum(self.shared)
        heads = self.x.size // r
        opened = partial.unflatten(-1, (k, heads, self.size)).unflatten(
            SEQUENCE, (r, partial.size(SEQUENCE) // r)
        )
        rows = opened.permute(4, 1, 0, 2, 3, 5).flatten(-2)
        return self.x._reduce_scatter_rows(rows.reshape(self.x.size * rows.size(2), *rows.shape[3:]))

    def _gather_shared(self, gradient: torch.Tensor) -> torch.Tensor:
        r, k = self.sharing.size, sum(self.shared)
        heads, (batch, stretch, _) = self.x.size // r, gradient.shape
        rows = self.x._gather_rows(gradient).reshape(heads, r, batch, stretch, k, self.size)
        return rows.permute(2, 1, 3, 4, 0, 5).reshape(batch, r * stretch, -1)
