"""One rank's part of one global tensor: the device groups that hold the tensor, and the blocks that the rank writes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Box, DeviceGroup, Layout

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The element types that can be stored, with their safetensors names."""


@dataclass(frozen=True)
class Piece:
    """This rank's local tensor of a global tensor, with the global tensor's layout.

    `local` is a plain tensor on any device, of shape ``layout.local_shape(coordinate)``; `Writer.save` reads
    it, `read` fills it in place. A rank that is in none of the tensor's device groups has no piece of it.
    """

    local: torch.Tensor
    layout: Layout
    owners: tuple[DeviceGroup, ...] = ()
    """The device groups that hold the tensor, in any order: disjoint, with equal values, and this rank's with the axes
    of the layout's mesh. Empty: one group, of all ranks of the mesh, which are all ranks of the run.
    """

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The device groups that hold the tensor on the mesh of this layout, in the order of their first ranks."""
        return tuple(group for group in self.holders if group.mesh.axes == self.layout.mesh.axes)

    @property
    def written(self) -> bool:
        """Whether the tensor is written in this layout: in that of the group with the first rank, where there are
        several."""
        return self.holders[0].mesh.axes == self.layout.mesh.axes

    @property
    def holders(self) -> tuple[DeviceGroup, ...]:
        """In the order of their first ranks, the same on every rank."""
        listed = self.owners or (DeviceGroup.of_all_ranks(self.layout.mesh),)
        return tuple(sorted(listed, key=lambda group: group.ranks[0]))

    @property
    def copies(self) -> int:
        """The number of ranks of the run that hold each element, in this layout."""
        return len(self.groups) * self.layout.copies

    def copy_index(self, rank: int) -> int:
        """The index of the copy that a rank of the run holds: 0 ≤ index < copies."""
        position = self._position(rank)
        return position * self.layout.copies + self.layout.copy_index(self.groups[position].coordinate(rank))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank of the run in its group's mesh."""
        return self.groups[self._position(rank)].coordinate(rank)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes of the global tensor that a rank of the run holds."""
        return self.layout.boxes(self.coordinate(rank))

    def held_by(self, rank: int) -> bool:
        """Whether a rank of the run holds a part. A mesh of one rank without `owners` is every process's own."""
        whole = not self.owners and self.layout.mesh.world == 1
        return whole or any(rank in group.ranks for group in self.groups)

    def spans(self, world: int) -> bool:
        """Whether the tensor is in one group, of all `world` ranks of the run in their order."""
        first, *others = self.groups
        return not others and tuple(first.ranks) == tuple(range(world))

    def description(self, world: int) -> dict[str, Any]:
        """The tensor's entry in the index of a run of `world` ranks, without blocks.

        A tensor that is not in one group of all ranks also has the mesh and the names of its groups.
        """
        entry: dict[str, Any] = {
            "shape": list(self.layout.shape),
            "dtype": dtype_name(self.local.dtype),
            "layout": str(self.layout),
        }
        if not self.spans(world):
            entry["mesh"] = [list(axis) for axis in self.layout.mesh.axes]
            entry["groups"] = [group.name for group in self.groups]
        return entry

    def _position(self, rank: int) -> int:
        """The index in `groups` of the group of a rank that holds a part (0 for every process's own mesh of one)."""
        return next((at for at, group in enumerate(self.groups) if rank in group.ranks), 0)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``, as the index files write it; ``getattr(torch, name)`` is the
    inverse.
    """
    return str(dtype).removeprefix("torch.")


def check(name: str, piece: Piece, rank: int) -> None:
    """Raise CheckpointError if a piece does not match what its groups and its layout assign to `rank`."""
    layout = piece.layout
    _check_groups(name, piece)
    own = next((group for group in piece.owners if rank in group.ranks), None)
    if own is not None and own.mesh.axes != layout.mesh.axes:
        raise CheckpointError(
            f"{name}: its layout is on mesh {layout.mesh.axes}, but device group {own.name!r} is on {own.mesh.axes}; "
            f"rank {rank} gives the layout that the tensor has in this group"
        )
    if not piece.held_by(rank):
        raise CheckpointError(
            f"{name}: rank {rank} is not in {_named(piece)}, which hold this tensor; leave it out on this rank"
        )
    if layout.partial:
        axes = ", ".join(sorted(layout.partial))
        raise CheckpointError(f"{name}: its sum over {axes} has not been taken; reduce it before saving")
    expected = layout.local_shape(piece.coordinate(rank))
    if tuple(piece.local.shape) != expected:
        raise CheckpointError(
            f"{name}: rank {rank} has a local tensor of shape {tuple(piece.local.shape)}, but layout "
            f"{layout} "
            f"gives it {expected}; pass the local tensor and the layout of the same parameter"
        )
    if piece.local.dtype not in SAFETENSORS_NAMES:
        known = ", ".join(dtype_name(dtype) for dtype in SAFETENSORS_NAMES)
        raise CheckpointError(f"{name}: {dtype_name(piece.local.dtype)} cannot be stored; use one of {known}")


def check_world(name: str, piece: Piece, world: int) -> None:
    """Raise CheckpointError if the ranks of a piece's groups are not ranks of a run of `world` ranks."""
    axes = piece.layout.mesh.axes
    if not piece.owners and piece.layout.mesh.world != world:
        raise CheckpointError(
            f"{name}: its layout is on mesh {axes} of {piece.layout.mesh.world} ranks, but the run has {world}; "
            "name the device groups that hold it (Piece.owners)"
        )
    for group in piece.groups:
        if unknown := [rank for rank in group.ranks if not 0 <= rank < world]:
            raise CheckpointError(
                f"{name}: device group {group.name!r} has rank {unknown[0]}, but the run has ranks 0 to {world - 1}"
            )


def _check_groups(name: str, piece: Piece) -> None:
    seen: set[int] = set()
    for group in piece.owners:
        if both := seen & set(group.ranks):
            raise CheckpointError(
                f"{name}: rank {min(both)} is in two of {_named(piece)}; name each device group once"
            )
        seen.update(group.ranks)


def _named(piece: Piece) -> str:
    return "the device groups " + ", ".join(repr(group.name) for group in piece.holders)


# Write partition: the boxes of each global tensor that a rank writes, each element exactly once.
#
# Ranks of a device group that differ only along axes that do not split a tensor hold copies of it, and so do the ranks
# at the same coordinate of all device groups that hold the tensor in one layout. Its boxes are cut into blocks, which
# are assigned to the copies round-robin, beginning with a copy that the tensor's name selects. Each rank computes this
# without communication.

LARGEST = 16 * 2**20
"""Approximate maximum bytes of a block, which is the unit of digests and so of reads."""
SMALLEST = 64 * 2**10
"""Tensors below this size in bytes are not cut just to distribute them over copies."""


@dataclass(frozen=True)
class WriteBlock:
    """A box of a named tensor that this rank writes, with its byte range in the file's data."""

    name: str
    box: Box
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name in the safetensors file: ``model.wte.weight[0:64, 0:32]``, the slices of the global
        tensor.
        """
        slices = (f"{o}:{o + s}" for o, s in zip(self.box.offset, self.box.size, strict=True))
        return f"{self.name}[{', '.join(slices)}]"


def cut(box: Box, itemsize: int, limit: int, dim: int = 0) -> Iterator[Box]:
    """Blocks of roughly at most `limit` bytes that make up `box`, each contiguous in it, cut from outer dims
    in.
    """
    count = math.prod(box.size) * itemsize
    if count <= limit or dim == len(box.size):
        yield box
        return
    length = box.size[dim]
    rows = -(-length // min(-(-count // limit), length))
    for start in range(0, length, rows):
        offset, local, size = list(box.offset), list(box.local), list(box.size)
        offset[dim] += start
        local[dim] += start
        size[dim] = min(rows, length - start)
        slab = Box(tuple(offset), tuple(local), tuple(size))
        # Only single rows are cut further: the last dims of a few large rows must not fall into crumbs.
        yield from cut(slab, itemsize, limit, dim + 1) if rows == 1 else (slab,)


def blocks(pieces: Mapping[str, Piece], rank: int) -> list[WriteBlock]:
    """The blocks of `pieces` that `rank`, a rank of the run, writes, in the order of the file.

    Wider element types come first: safetensors has no holes between tensors, and each must be aligned.
    """
    mine: list[tuple[str, Box, torch.dtype]] = []
    for name, piece in pieces.items():
        copies, itemsize = piece.copies, piece.local.dtype.itemsize
        copy = piece.copy_index(rank)
        turn = zlib.crc32(name.encode())
        for box in piece.boxes(rank):
            share = -(-math.prod(box.size) * itemsize // copies)
            for block in cut(box, itemsize, min(LARGEST, max(SMALLEST, share))):
                if turn % copies == copy:
                    mine.append((name, block, piece.local.dtype))
                turn += 1
    mine.sort(key=lambda block: -block[2].itemsize)
    result, at = [], 0
    for name, box, dtype in mine:
        size = math.prod(box.size) * dtype.itemsize
        result.append(WriteBlock(name, box, dtype, at, at + size))
        at += size
    return result
