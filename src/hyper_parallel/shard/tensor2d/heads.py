"""From products that are partial over tensor_x to whole heads, and back.

Each rank of tensor_x has a term of all the heads that its rank of tensor_y computes. A reduce-scatter along
the features gives each one its own heads, whole. Where there are fewer key-value heads than ranks, it gives each one
an equal piece of a head, and the ranks that attend with the head put it together: less than sending each of them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyper_parallel.shard.axis import Axis


@dataclass(frozen=True)
class ScatterHeads:
    """[B, S, F] partial over `x` to [B, S, F / x · …]: each part of F on its own; those in `shared` with the
    neighbours along `sharing` put together."""

    x: Axis
    parts: tuple[int, ...]
    """The features of the parts, on each rank of tensor_y."""
    shared: tuple[bool, ...]
    sharing: Axis

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        if self.x.size == 1:
            return partial
        mine: torch.Tensor = self.x._move(self._scatter, self._gather, partial)
        if not any(self.shared) or self.sharing.size == 1:
            return mine
        pieces = mine.split([length // self.x.size for length in self.parts], -1)
        whole = [
            self.sharing.gather_sum(piece, -1) if shared else piece
            for piece, shared in zip(pieces, self.shared, strict=True)
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole, -1)

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        pieces = [
            part.unflatten(-1, (n, part.size(-1) // n)).movedim(-2, 0)
            for part in partial.split(list(self.parts), -1)
        ]
        rows = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, -1)
        return self.x._reduce_scatter_rows(rows.flatten(0, 1))

    def _gather(self, gradient: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        rows = self.x._gather_rows(gradient).unflatten(0, (n, gradient.size(0)))
        if len(self.parts) == 1:
            whole_of_one: torch.Tensor = rows.movedim(0, -2).flatten(-2)
            return whole_of_one
        pieces = rows.split([length // n for length in self.parts], -1)
        whole: list[torch.Tensor] = [row for piece in pieces for row in piece.unbind(0)]
        return torch.cat(whole, -1)
