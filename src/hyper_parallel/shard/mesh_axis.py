"""One axis of the device mesh as the shard engine sees it: its size, this rank's index, its collectives.

Activations move between three states along an axis — whole, split on a dim, and partial (a sum not yet
taken) — by these functions, each with the backward pass that the chain rule asks for (Megatron-LM,
arXiv 1909.08053, section 3; with sequence sharding arXiv 2205.05198, section 4.2.2):

| function | forward | backward |
|---|---|---|
| `copy` | identity | all-reduce |
| `reduce` | all-reduce | identity |
| `split` | this rank's chunk | all-gather |
| `gather` | all-gather | this rank's chunk |
| `gather_sum` | all-gather | reduce-scatter |
| `reduce_split` | reduce-scatter | all-gather |
| `swap` | all-to-all | all-to-all back |
| `exchange` | uneven all-to-all of rows | back |

A dim that the axis does not divide is split like ``torch.chunk`` does: chunks of ceil(L / n), the last
shorter or empty. They are padded on the way, and only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import int_on_rank, per_rank, per_rank_int
from hyper_parallel.layout.layout import chunk
from hyper_parallel.layout.mesh import DeviceGroup

# Hierarchical collectives: one link level after another.
#
# A group of n = a · b · c ranks, outermost level first, counts through its levels like digits. With a ranks on the
# slowest level (after Thakur, Rabenseifner and Gropp, 2005; two-level all-to-all as in DeepSpeed-MoE,
# arXiv 2201.05596, section 5.2):
#
# | collective | steps | a rank sends over the slowest level |
# |---|---|---|
# | all-reduce of B bytes | reduce-scatter inside, all-reduce across, all-gather inside | 2 (a − 1)/a · B/(b c) |
# | reduce-scatter of n chunks of β | inside, then across | (a − 1) β |
# | all-gather of chunks of β | across, then inside | (a − 1) β |
# | all-to-all of n chunks of β | inside, then across | (a − 1) b c β, in a − 1 messages |
#
# Flat, a ring sends 2 (n − 1)/n · B and (n − 1) β over each of its links, and at least one of the b · c links of an
# island is slow; an all-to-all sends the same bytes in (a − 1) b c messages. With three levels a chunk of an all-to-all
# that leaves its supernode crosses the middle level too, which a flat one spares it. The order of chunks is restored,
# so the results are those of the flat collectives: exactly for what only moves, to rounding for sums.


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


@dataclass(frozen=True)
class Axis:
    """An axis, a joint or a fold of axes, with its process group. `devices` says which rank has which index."""

    name: str
    devices: DeviceGroup
    group: str
    order: tuple[int, ...] | None = None
    """The index of each rank of the group, in order of rank; None when they are 0, 1, 2, …"""
    levels: Levels | None = None
    """How to run collectives level by level, where the axis spans link levels and the placement wants it."""

    @property
    def size(self) -> int:
        """The degree of the axis."""
        return self.devices.mesh.size(self.name)

    def index(self, rank: int) -> int:
        """The index along the axis of a global rank."""
        return self.devices.index(self.name, rank)

    def interval(self, length: int, rank: int) -> tuple[int, int]:
        """The half-open interval of a dim of `length` that a global rank holds."""
        return chunk(int_on_rank(length, rank), self.size, self.index(rank))

    def indices(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64[L_local]: the global indices of a dim of `length` that this rank holds."""
        return per_rank(lambda rank: torch.arange(*self.interval(length, rank), device=device))

    # Tensor moves without autograd; the functions below give them their backward.

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.levels.all_reduce(x) if self.levels else collectives.all_reduce(x, self.group)

    def _gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.levels.all_gather(x) if self.levels else collectives.all_gather(x, self.group, self.size)

    def _reduce_scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.levels:
            return self.levels.reduce_scatter(x)
        return collectives.reduce_scatter(x, self.group, self.size)

    def _all_to_all_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.levels:
            return self.levels.all_to_all(x)
        even = [1] * self.size
        return collectives.all_to_all(x, even, even, self.group)

    def _chunk(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        length = x.size(dim)
        start = per_rank_int(lambda rank: self.interval(length, rank)[0])
        count = per_rank_int(lambda rank: self.interval(length, rank)[1] - self.interval(length, rank)[0])
        return x.narrow(dim, start, count).contiguous()

    def _gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        dim %= x.dim()
        x = _pad(x, dim, -(-length // self.size))
        before = x.shape[:dim]
        leading = _all_ones(before)
        whole = self._gather_rows(x.reshape(x.shape[dim:]) if leading else x)
        if self.order is not None or not leading:
            chunks = whole.chunk(self.size, 0)
            whole = torch.cat([chunks[at] for at in self._by_index()], 0 if leading else dim)
        if leading:
            whole = whole.reshape(*before, *whole.shape)
        return whole.narrow(dim, 0, length) if whole.size(dim) != length else whole

    def _reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        dim %= x.dim()
        length, size = x.size(dim), -(-x.size(dim) // self.size)
        x = _pad(x, dim, size * self.size)
        before = x.shape[:dim]
        leading = _all_ones(before)
        if leading:
            x = x.reshape(x.shape[dim:])
        if self.order is not None or not leading:
            chunks = x.chunk(self.size, 0 if leading else dim)
            x = torch.cat([chunks[index] for index in self.order or range(self.size)], 0)
        part = self._reduce_scatter_rows(x)
        if leading:
            part = part.reshape(*before, *part.shape)
        if length % self.size:
            count = per_rank_int(lambda rank: self.interval(length, rank)[1] - self.interval(length, rank)[0])
            part = part.narrow(dim, 0, count).contiguous()
        return part

    def _swap(self, x: torch.Tensor, split_dim: int, gather_dim: int) -> torch.Tensor:
        chunks = x.chunk(self.size, split_dim)
        rows = torch.stack([chunks[index] for index in self.order or range(self.size)])
        received = self._all_to_all_rows(rows).unbind(0)
        return torch.cat([received[at] for at in self._by_index()], gather_dim)

    def _by_index(self) -> Sequence[int]:
        """Where in the group the rank of each index stands."""
        if self.order is None:
            return range(self.size)
        return [self.order.index(index) for index in range(self.size)]

    # With autograd.

    def _move(self, forward: _Move, backward: _Move, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Moved.apply(x, forward, backward)  # type: ignore[no-any-return]

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Identity; the gradient is summed over the axis."""
        return self._move(_same, self._reduce, x)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the axis; the gradient passes."""
        return self._move(self._reduce, _same, x)

    def split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's chunk of `dim`; the gradient is gathered."""
        length = x.size(dim)
        return self._move(lambda x: self._chunk(x, dim), lambda g: self._gather(g, dim, length), x)

    def gather(self, x: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """The whole of `dim`, for uses that are the same on all ranks; the gradient is this rank's chunk.

        `length` is that of the whole dim, needed where the axis does not divide it.
        """
        whole = length if length is not None else x.size(dim) * self.size
        return self._move(lambda x: self._gather(x, dim, whole), lambda g: self._chunk(g, dim), x)

    def gather_sum(self, x: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """The whole of `dim`, for uses that differ between ranks; the gradient is summed and scattered."""
        whole = length if length is not None else x.size(dim) * self.size
        return self._move(lambda x: self._gather(x, dim, whole), lambda g: self._reduce_scatter(g, dim), x)

    def reduce_split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's chunk of `dim` of the sum over the axis; the gradient is gathered."""
        length = x.size(dim)
        return self._move(lambda x: self._reduce_scatter(x, dim), lambda g: self._gather(g, dim, length), x)

    def swap(self, x: torch.Tensor, split_dim: int, gather_dim: int) -> torch.Tensor:
        """This rank's chunk of `split_dim` of what all ranks have, their chunks of `gather_dim` put together.

        [.., S, .., d] to [.., S / n, .., d · n]. The axis must divide `split_dim`, and chunks be equal.
        """
        assert x.size(split_dim) % self.size == 0, f"{x.size(split_dim)} over {self.name} of {self.size}"
        return self._move(
            lambda x: self._swap(x, split_dim, gather_dim), lambda g: self._swap(g, gather_dim, split_dim), x
        )

    def exchange(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows to the ranks of the axis: `send[i]` of `x`, in order, to index i; `receive[i]` rows come from it.

        [sum(send), ...] to [sum(receive), ...]. Counts may differ between ranks.
        """
        assert self.order is None, (
            f"rows cannot be exchanged over {self.name}, whose indices are not in rank order"
        )
        return self._move(
            lambda x: collectives.all_to_all(x, send, receive, self.group),
            lambda g: collectives.all_to_all(g, receive, send, self.group),
            x,
        )


_Move = Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _all_ones(lengths: torch.Size) -> bool:
    """Whether chunks of the dim after these lie one after the other in memory."""
    return all(isinstance(length, int) and length == 1 for length in lengths)


def _pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`x` with zeros at the end of `dim` up to `length`."""
    missing = length - x.size(dim)
    if isinstance(missing, int) and missing == 0:
        return x
    after = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]
    return torch.nn.functional.pad(x, after)


class _Moved(torch.autograd.Function):
    """A linear map given with its transpose."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: _Move, backward: _Move) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def,override]
        return ctx.transpose(gradient), None, None
