"""Hierarchical collectives: one link level after another.

A group of n = a · b · c ranks, outermost level first, counts through its levels like digits. With a ranks on the
slowest level (after Thakur, Rabenseifner and Gropp, 2005; two-level all-to-all as in DeepSpeed-MoE,
arXiv 2201.05596, section 5.2):

| collective | steps | a rank sends over the slowest level |
|---|---|---|
| all-reduce of B bytes | reduce-scatter inside, all-reduce across, all-gather inside | 2 (a − 1)/a · B/(b c) |
| reduce-scatter of n chunks of β | inside, then across | (a − 1) β |
| all-gather of chunks of β | across, then inside | (a − 1) β |
| all-to-all of n chunks of β | inside, then across | (a − 1) b c β, in a − 1 messages |

Flat, a ring sends 2 (n − 1)/n · B and (n − 1) β over each of its links, and at least one of the b · c links of an
island is slow; an all-to-all sends the same bytes in (a − 1) b c messages. With three levels a chunk of an all-to-all
that leaves its supernode crosses the middle level too, which a flat one spares it. The order of chunks is restored, so
the results are those of the flat collectives: exactly for what only moves, to rounding for sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hyper_parallel.compat import collectives


@dataclass(frozen=True)
class Part:
    """The ranks of a group that differ on one level only."""

    level: str
    size: int
    group: str


@dataclass(frozen=True)
class Levels:
    """A group whose ranks, in ascending order, count through `parts`, outermost first. `whole` is its own name."""

    parts: tuple[Part, ...]
    whole: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each level joins, outermost first."""
        return tuple(part.size for part in self.parts)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the group, on every rank. With fewer elements than ranks inside there is nothing to
        scatter, and it goes flat."""
        inside = math.prod(self.sizes[1:])
        if x.numel() < inside:
            return collectives.all_reduce(x, self.whole)
        flat = x.reshape(-1)
        missing = -x.numel() % inside
        if missing:
            flat = torch.nn.functional.pad(flat, (0, missing))
        for part in reversed(self.parts[1:]):
            flat = collectives.reduce_scatter(flat, part.group, part.size)
        flat = collectives.all_reduce(flat, self.parts[0].group)
        for part in self.parts[1:]:
            flat = collectives.all_gather(flat, part.group, part.size)
        return flat[: x.numel()].view(x.shape) if missing else flat.view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[d0, ...] of each rank to [n · d0, ...], in rank order. All ranks give the same shape."""
        shape = x.shape
        for part in self.parts:
            x = collectives.all_gather(x, part.group, part.size)
        # What was gathered last, the innermost level, stands outermost now.
        return self._reversed(x.reshape(*reversed(self.sizes), *shape)).reshape(
            math.prod(self.sizes) * shape[0], *shape[1:]
        )

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[n · d0, ...] to [d0, ...]: each rank gets its chunk of dim 0 of the sum over the group."""
        chunk = x.size(0) // math.prod(self.sizes)
        x = self._reversed(x.reshape(*self.sizes, chunk, *x.shape[1:])).reshape(x.shape)
        for part in reversed(self.parts):
            x = collectives.reduce_scatter(x, part.group, part.size)
        return x

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] to [n, ...]: chunk i of each rank, of one row, to rank i of the group."""
        shape = x.shape
        x = x.reshape(*self.sizes, *shape[1:])
        for dim, part in reversed(list(enumerate(self.parts))):
            even = [1] * part.size
            # Along the level's dim stood where chunks go; after the exchange stands where they come from.
            x = collectives.all_to_all(x.movedim(dim, 0), even, even, part.group).movedim(0, dim)
        return x.reshape(shape)

    def _reversed(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with its dims of levels in the opposite order."""
        count = len(self.parts)
        return x.permute(*reversed(range(count)), *range(count, x.dim()))
