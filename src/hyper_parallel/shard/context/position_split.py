"""Position split: which positions of a sequence each rank holds.

The axis has index ``ring · u + ulysses``. With a ring of r, the sequence is cut into 2r pieces, and ring index i has
pieces i and 2r − 1 − i, one from the head and one from the tail: under a causal mask every ring index then has the
same work (Llama 3, arXiv 2407.21783, section 3.3.2; "zigzag"). What a ring index has is split evenly over its u Ulysses
ranks, in order. Without a ring, u is the whole axis and each rank holds one run of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hyper_parallel.compat.local_tensor import int_on_rank, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.mesh_axis import Axis


def length_multiple(ring: int, ulysses: int) -> int:
    """What a sequence's length must be a multiple of, to be dealt over rings of `ring` ranks of `ulysses`."""
    return math.lcm(2 * ring if ring > 1 else 1, ring * ulysses)


@dataclass(frozen=True)
class PositionSplit:
    """Split of positions over the axis `context`, in which groups of `ulysses` ranks exchange heads."""

    context: Axis
    ulysses: int = 1

    @property
    def ring(self) -> int:
        """How many ring indices there are."""
        return self.context.size // self.ulysses

    @property
    def multiple(self) -> int:
        """What a sequence's length must be a multiple of."""
        return length_multiple(self.ring, self.ulysses)

    def check(self, length: int) -> None:
        """Refuse a sequence of `length` positions that cannot be dealt evenly."""
        if length % self.multiple:
            raise StrategyError(
                f"{length} positions cannot be split over axes.context = {self.context.size} with rings of "
                f"{self.ring} and Ulysses over {self.ulysses}; pad the sequence to a multiple of {self.multiple}"
            )

    def pieces(self, length: int, ring: int) -> tuple[Interval, ...]:
        """The intervals of positions that a ring index has, in order of position, which is that of its tensors."""
        return position_chunks(length, self.ring, ring)

    def positions(self, length: int, index: int) -> torch.Tensor:
        """int64[length / size]: the global positions that an index of the axis holds, in its order."""
        ring, inner = divmod(index, self.ulysses)
        runs = [torch.arange(start, stop) for start, stop in self.pieces(length, ring)]
        return torch.cat(runs).chunk(self.ulysses)[inner]

    def indices(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64[length / size]: the global positions that this rank holds, in its order."""

        def mine(rank: int) -> torch.Tensor:
            return self.positions(int_on_rank(length, rank), self.context.index(rank)).to(device)

        return per_rank(mine)

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of what is whole on every rank. Raises StrategyError for a length it cannot deal.

        The gradient is this rank's part of the whole one, zero elsewhere: the ranks' parts are summed, as are all
        gradients over the context axis.
        """
        self.check(x.size(dim))
        return x.index_select(dim, self.indices(x.size(dim), x.device))

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All positions in their own order, from each rank's; for uses that are the same on every rank."""
        whole = self.context.gather(x, dim)
        order = torch.cat([self.positions(whole.size(dim), index) for index in range(self.context.size)])
        return whole.index_select(dim, torch.argsort(order).to(x.device))


def position_chunks(length: int, rings: int, ring: int) -> tuple[Interval, ...]:
    """The intervals of positions of one of `rings` ring indices: one from the head and one from the tail."""
    if rings == 1:
        return ((0, length),)
    size = length // (2 * rings)
    tail = 2 * rings - 1 - ring
    return (ring * size, (ring + 1) * size), (tail * size, (tail + 1) * size)
