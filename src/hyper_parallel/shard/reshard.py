"""Tensors and layouts: pieces cut and gathered, resharding by one uneven all-to-all, and DTensor placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import on_rank, per_rank, per_rank_int
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout, Transfer, transfers
from hyper_parallel.layout.mesh import Coordinate, Mesh
from hyper_parallel.shard.process_mesh import ProcessMesh


def reshard(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """Reshard a tensor: this rank's piece in layout `target`, from `local`, its piece in layout `source`.

    Layouts may be uneven, fused, joint, folded and partial. Partial sums are added in order of rank, so that all copies
    of the result are bitwise equal. Every rank of the default process group calls it. No gradient flows.

    Raises StrategyError when the layouts have different shapes or numbers of ranks.
    """
    world = source.mesh.world
    outgoing: list[list[Transfer]] = [[] for _ in range(world)]
    incoming: list[list[Transfer]] = [[] for _ in range(world)]
    for transfer in transfers(source, target):
        outgoing[transfer.sender].append(transfer)
        incoming[transfer.receiver].append(transfer)
    local = local.detach()

    def pack(rank: int) -> torch.Tensor:
        mine = on_rank(local, rank)
        return torch.cat([mine.new_empty(0), *(mine[one.give].reshape(-1) for one in outgoing[rank])])

    def unpack(rank: int) -> torch.Tensor:
        came = on_rank(rows, rank)
        piece = came.new_zeros(target.local_shape(target.mesh.coordinate(rank)))
        sizes = [math.prod(one.shape) for one in incoming[rank]]
        for one, elements in zip(incoming[rank], came.split(sizes), strict=True):
            piece[one.take] += elements.view(one.shape)
        return piece

    rows = per_rank(pack)
    if world > 1:
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        send = [per_rank_int(_counter(outgoing, peer, "receiver")) for peer in range(world)]
        receive = [per_rank_int(_counter(incoming, peer, "sender")) for peer in range(world)]
        rows = collectives.all_to_all(rows, send, receive, group)
    return per_rank(unpack)


def _counter(moved: Sequence[Sequence[Transfer]], peer: int, side: str) -> Callable[[int], int]:
    """Rank to how many elements it sends to a peer, or gets from it."""
    return lambda rank: sum(math.prod(one.shape) for one in moved[rank] if getattr(one, side) == peer)


def cut(full: torch.Tensor, layout: Layout, coordinate: Coordinate) -> torch.Tensor:
    """A copy of a whole tensor's piece at a coordinate of the layout's mesh."""
    local = torch.empty(layout.local_shape(coordinate), dtype=full.dtype, device=full.device)
    for box in layout.boxes(coordinate):
        local[box.local_slices] = full[box.global_slices]
    return local


def fill_piece(local: torch.Tensor, source: Any, layout: Layout, coordinate: Coordinate) -> None:
    """Write the piece at a coordinate from a whole tensor, or from what else gives slices of one: a file's."""
    for box in layout.boxes(coordinate):
        local[box.local_slices].copy_(source[box.global_slices])


def cut_on_ranks(axes: ProcessMesh, full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's piece of a whole tensor that every rank has."""
    return per_rank(lambda rank: cut(on_rank(full, rank), layout, axes.devices.coordinate(rank)))


def gathered(axes: ProcessMesh, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The whole tensor, on every rank, from each one's piece. Uneven and fused layouts included."""
    if all(axes.mesh.size(axis) == 1 for axis in layout.split_axes):
        return local

    def place(rank: int) -> torch.Tensor:
        mine = on_rank(local, rank)
        whole = torch.zeros(layout.shape, dtype=mine.dtype, device=mine.device)
        for box in layout.boxes(axes.devices.coordinate(rank)):
            whole[box.global_slices] = mine[box.local_slices]
        return whole

    return axes.all_reduce(per_rank(place), layout.split_axes)


# A Layout as the placements of a DTensor, and back.
#
# A DTensor has one placement for each axis of its mesh: `Shard(dim)`, `Replicate()` or `Partial()`. Where several axes
# split one dim they do so in the order of the mesh. What a Layout can say and placements cannot:
#
# | Layout | Why not |
# |---|---|
# | `[8/tensor_x/shard]` where shard is the outer axis of the mesh | axes split in the order of the mesh |
# | `[6/shard*context]`, when shard and context do not divide it | a joint cuts once, axes one after the other cut again
# | | `[8/expert]`, where the fold is no product of whole axes | it has no mesh dim |
# | `[(4+2+2)/tensor_x]` | a dim is split as a whole, not part by part |
# | `[4@2.0.1.3/shard]` | a dim is split in the order of its indices |


def layout_to_placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement for each axis of `layout.mesh`, in its order, on a device mesh of the same shape.

    Raises StrategyError when placements cannot say what the layout does.
    """
    mesh = layout.mesh
    if layout.parts:
        raise _inexpressible(layout, "a fused dim is split part by part")
    if layout.order:
        raise _inexpressible(layout, "a dim is split in another order than that of its indices")
    by_axis: dict[str, Placement] = {}
    for dim, names in enumerate(layout.dims):
        axes = [axis for name in names for axis in _whole_axes(layout, name)]
        if sorted(axes, key=mesh.names.index) != axes:
            raise _inexpressible(
                layout, f"dim {dim} is split by {' before '.join(axes)}, against the mesh's order"
            )
        by_axis |= dict.fromkeys(axes, Shard(dim))
        # A joint cuts once where its axes cut one after the other, which differs where a length is not divided.
        nested = Layout(mesh, (layout.shape[dim],), (tuple(axes),))
        own = Layout(mesh, (layout.shape[dim],), (names,))
        for indices in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
            coordinate = dict(zip(axes, indices, strict=True))
            if nested.intervals(0, coordinate) != own.intervals(0, coordinate):
                raise _inexpressible(
                    layout, f"{'/'.join(axes)} cut a length of {layout.shape[dim]} elsewhere"
                )
    for name in sorted(layout.partial):
        by_axis |= {axis: Partial() for axis in _whole_axes(layout, name)}
    return tuple(by_axis.get(axis, Replicate()) for axis in mesh.names)


def placements_to_layout(placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int]) -> Layout:
    """The Layout of a DTensor of `shape`, on a device mesh of the axes of `mesh` in their order.

    Raises StrategyError for placements other than Shard, Replicate and a partial sum.
    """
    dims: list[tuple[str, ...]] = [()] * len(shape)
    partial = set()
    for axis, placement in zip(mesh.names, placements, strict=True):
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            dims[dim] = (*dims[dim], axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.add(axis)
        elif type(placement) is not Replicate:
            raise StrategyError(
                f"the placement {placement} over {axis} is no Layout; "
                "redistribute to Shard, Replicate or Partial() first"
            )
    return Layout(mesh, tuple(shape), tuple(dims), partial=frozenset(partial))


def _whole_axes(layout: Layout, name: str) -> list[str]:
    """The axes, outer to inner and of degree above 1, that an axis, joint or fold is the product of."""
    mesh = layout.mesh
    if "*" in name:
        return [axis for part in name.split("*") for axis in _whole_axes(layout, part)]
    fold = dict(mesh.folds).get(name)
    if fold is None:
        return [name] if mesh.size(name) > 1 else []
    axes: list[str] = []
    stride = 1
    for axis in reversed(fold.over):
        size = mesh.size(axis)
        if fold.stride <= stride and stride * size <= fold.stride * fold.size and size > 1:
            axes.insert(0, axis)
        elif stride * size > fold.stride and stride < fold.stride * fold.size and size > 1:
            raise _inexpressible(layout, f"{name} is a part of {axis}")
        stride *= size
    return axes


def _inexpressible(layout: Layout, why: str) -> StrategyError:
    return StrategyError(
        f"{layout} has no DTensor placements: {why}; move it with hyper_parallel.shard.reshard instead"
    )
