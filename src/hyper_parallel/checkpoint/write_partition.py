"""Write partition: the boxes of each global tensor that a rank writes, each element exactly once.

Ranks of a device group that differ only along axes that do not split a tensor hold copies of it, and so do the ranks at
the same coordinate of all device groups that hold the tensor in one layout. Its boxes are cut into blocks, which are
assigned to the copies round-robin, beginning with a copy that the tensor's name selects. Each rank computes this
without communication.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hyper_parallel.checkpoint.shard import Piece
from hyper_parallel.layout import Box

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
