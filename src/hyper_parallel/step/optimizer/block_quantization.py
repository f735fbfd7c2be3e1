"""Block-wise quantization to 8 bits with a dynamic map (Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2).

Each block of consecutive elements of a row is divided by its largest magnitude, its scale, and every element becomes
the index of the nearest of 256 values. The map has seven decades, each twice as finely divided as the one below, so
that small elements keep relative precision. With a map of both signs:

    q = argmin_i |x / s − map_i|,  s = max |x| over the block              `quantized`
    x ≈ s · map_q                                                          `dequantized`

A row's last block may be shorter. Blocks lie along the last dim only, so a tensor that is split along other dims, or
between blocks, has the codes and scales of the whole one (`scale_layout`).
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from hyper_parallel.layout import Layout

DECADES = 7


@functools.cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 values in ascending order: 0, 1 and the middles of 2^i (unsigned: 2^(i + 1)) intervals of the decade
    10^(i − 6) · [0.1, 1], in both signs if `signed`."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if signed else decade + 1)
        step = 0.9 / count
        found = [10.0 ** (decade - DECADES + 1) * (0.1 + (at + 0.5) * step) for at in range(count)]
        values += found + ([-value for value in found] if signed else [])
    return tuple(sorted(values))


@functools.cache
def _borders(signed: bool) -> tuple[float, ...]:
    values = dynamic_map(signed)
    return tuple((a + b) / 2 for a, b in itertools.pairwise(values))


def blocks(length: int, block: int) -> int:
    """The number of blocks of a row."""
    return -(-length // block)


def quantized(tensor: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """[..., L] to codes uint8[..., L] and scales [..., blocks(L)]; without negative elements unless `signed`."""
    *rows, length = tensor.shape
    count = blocks(length, block)
    missing = count * block - length
    padded = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
    in_blocks = padded.reshape(*rows, count, block)
    scales = in_blocks.abs().amax(-1)
    # A block of zeros has the scale 0; whatever its codes are, it is 0 again.
    tiny = torch.finfo(tensor.dtype).tiny
    relative = (in_blocks / scales.clamp(min=tiny).unsqueeze(-1)).reshape(*rows, count * block)
    borders = torch.tensor(_borders(signed), dtype=tensor.dtype, device=tensor.device)
    codes = torch.bucketize(relative, borders, out_int32=True).to(torch.uint8)
    return codes[..., :length] if missing else codes, scales


def dequantized(codes: Tensor, scales: Tensor, block: int, signed: bool) -> Tensor:
    """The inverse of `quantized`, up to its rounding: [..., L] in the dtype of `scales`."""
    length = codes.shape[-1]
    values = torch.tensor(dynamic_map(signed), dtype=scales.dtype, device=scales.device)
    relative = values.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
    return relative * scales.repeat_interleave(block, -1)[..., :length]


def scale_layout(layout: Layout, block: int) -> Layout | None:
    """Where the scales of a laid-out tensor lie; None where a split of its last dim does not fall between blocks."""
    last = len(layout.shape) - 1
    shape = (*layout.shape[:last], blocks(layout.shape[last], block))
    split = layout.dims[last]
    parts = {dim: lengths for dim, lengths in layout.parts.items() if dim != last}
    if split and last in layout.parts:
        parts[last] = tuple(blocks(length, block) for length in layout.parts[last])
        if sum(parts[last]) != shape[last]:
            return None
    if last in layout.order:
        return None
    found = Layout(layout.mesh, shape, layout.dims, parts, layout.partial, layout.order)
    return found if not split or _between_blocks(layout, found, block) else None


@functools.lru_cache(maxsize=256)
def _between_blocks(layout: Layout, scales: Layout, block: int) -> bool:
    last = len(layout.shape) - 1
    length = layout.shape[last]
    for rank in range(layout.mesh.world):
        here = layout.mesh.coordinate(rank)
        held = [(a * block, min(b * block, length)) for a, b in scales.intervals(last, here)]
        if _joined(held) != _joined(layout.intervals(last, here)):
            return False
    return True


def _joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The intervals, with neighbours that touch as one."""
    found: list[tuple[int, int]] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
