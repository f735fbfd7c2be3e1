"""Tensors and layouts: pieces cut and gathered, and resharding by one uneven all-to-all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import on_rank, per_rank, per_rank_int
from hyper_parallel.layout.layout import Layout, Transfer, transfers
from hyper_parallel.layout.mesh import Coordinate
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
