"""One axis of the device mesh as the shard engine sees it: its size, this rank's index, its collectives.

Activations move between three states along an axis — whole, split on a dim, and partial (a sum not yet
taken) — by five functions, each with the backward pass that the chain rule asks for (Megatron-LM,
arXiv 1909.08053, section 3; with sequence sharding arXiv 2205.05198, section 4.2.2):

| function | forward | backward |
|---|---|---|
| `copy` | identity | all-reduce |
| `reduce` | all-reduce | identity |
| `split` | this rank's chunk | all-gather |
| `gather` | all-gather | this rank's chunk |
| `gather_sum` | all-gather | reduce-scatter |
| `reduce_split` | reduce-scatter | all-gather |

A dim that the axis does not divide is split like ``torch.chunk`` does: chunks of ceil(L / n), the last
shorter or empty. They are padded on the way, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import int_on_rank, per_rank, per_rank_int
from hyper_parallel.layout.layout import chunk
from hyper_parallel.layout.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """An axis with its process group. `mesh` says which rank has which index."""

    name: str
    mesh: Mesh
    group: str

    @classmethod
    def of(cls, name: str, mesh: Mesh, device_mesh: DeviceMesh | None) -> Axis:
        """The axis `name`; without a device mesh only an axis of degree 1 makes sense."""
        assert device_mesh is not None or mesh.size(name) == 1, f"axis {name} needs a device mesh"
        group = "" if device_mesh is None or mesh.size(name) == 1 else device_mesh.get_group(name).group_name
        return cls(name, mesh, group)

    @property
    def size(self) -> int:
        """The degree of the axis."""
        return self.mesh.size(self.name)

    def index(self, rank: int) -> int:
        """The index along the axis of a global rank."""
        return self.mesh.coordinate(rank)[self.name]

    def interval(self, length: int, rank: int) -> tuple[int, int]:
        """The half-open interval of a dim of `length` that a global rank holds."""
        return chunk(int_on_rank(length, rank), self.size, self.index(rank))

    def indices(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64[L_local]: the global indices of a dim of `length` that this rank holds."""
        return per_rank(lambda rank: torch.arange(*self.interval(length, rank), device=device))

    # Tensor moves without autograd; the functions below give them their backward.

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, self.group)

    def _chunk(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        length = x.size(dim)
        start = per_rank_int(lambda rank: self.interval(length, rank)[0])
        count = per_rank_int(lambda rank: self.interval(length, rank)[1] - self.interval(length, rank)[0])
        return x.narrow(dim, start, count).contiguous()

    def _gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        x = _pad(x, dim, -(-length // self.size))
        whole = collectives.all_gather(x, self.group, self.size)
        if dim != 0:
            whole = torch.cat(whole.chunk(self.size, 0), dim)
        return whole.narrow(dim, 0, length) if whole.size(dim) != length else whole

    def _reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        length, size = x.size(dim), -(-x.size(dim) // self.size)
        x = _pad(x, dim, size * self.size)
        if dim != 0:
            x = torch.cat(x.chunk(self.size, dim), 0)
        part = collectives.reduce_scatter(x, self.group, self.size)
        if length % self.size:
            count = per_rank_int(lambda rank: self.interval(length, rank)[1] - self.interval(length, rank)[0])
            part = part.narrow(dim, 0, count).contiguous()
        return part

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


_Move = Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


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
