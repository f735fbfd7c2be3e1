"""Whole tensors: the piece that a rank holds cut from one, and one gathered from each rank's piece."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.compat.local_tensor import on_rank, per_rank
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Coordinate
from hyper_parallel.shard.process_mesh import ProcessMesh


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
