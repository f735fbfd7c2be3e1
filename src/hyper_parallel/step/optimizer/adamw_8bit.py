"""AdamW with moments in 8 bits (Dettmers et al., arXiv 2110.02861), in PyTorch's own operators.

An update decodes both moments (`block_quantization`), computes AdamW's formulas in float32, moves the parameter by
the result, and encodes the moments anew. The parameter itself is not quantized. Embeddings keep float32 moments, as
the paper advises, and so do parameters of one dim and small ones, which save nothing.

The update of one parameter at a time takes a few float32 temporaries of its local size; there is no fused kernel. No
library is needed, the operators run on any device, and a captured step has them as it has others.

**On several ranks** codes lie as the parameter, and scales as its blocks. A split of rows that does not fall between
blocks would give other scales than one device's, and is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyper_parallel.checkpoint import Piece
from hyper_parallel.config.train import AdamW8bitConfig, AdamWConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedParameter
from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.step.optimizer.per_parameter import Held, PerParameter, Shape, move, wide

SMALLEST = 4096
"""Elements of a parameter from which on its moments are quantized."""
SMALLEST_BLOCK = 16


class AdamW8bit:
    """AdamW over `parameters`, with the moments of those in `narrow` in 8 bits."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], config: AdamW8bitConfig, narrow: set[str]
    ) -> None:
        """Raises StrategyError where a split of rows does not fall between blocks."""
        self.config = config
        in_8_bits = [p for p in parameters if p.name in narrow]
        _check_blocks(in_8_bits, config.block)
        self._narrow = _Narrow(in_8_bits, config)
        whole = AdamWConfig(
            lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        self._others = AdamW([p for p in parameters if p.name not in narrow], whole)

    @classmethod
    def of(cls, model: nn.Module, parameters: list[ShardedParameter], config: AdamW8bitConfig) -> AdamW8bit:
        """AdamW in 8 bits for a parallelized model."""
        tables = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        narrow = {
            p.name
            for p in parameters
            if len(p.layout.shape) >= 2 and _elements(p) >= SMALLEST and p.name not in tables
        }
        return cls(parameters, config, narrow)

    def step(self, lr_scale: float | Tensor) -> None:
        """One update of every parameter that has a gradient."""
        self._narrow.step(lr_scale)
        self._others.step(lr_scale)

    def advance(self) -> None:
        """Count an update that a step's graph did."""
        self._narrow.advance()
        self._others.advance()

    def pieces(self) -> dict[str, Piece]:
        """Codes, ``optimizer.exp_avg.<parameter>`` and ``exp_avg_sq``, and scales, ``exp_avg_scale`` and
        ``exp_avg_sq_scale``; AdamW's moments of the rest."""
        return {**self._narrow.pieces(), **self._others.pieces()}

    def tensors(self) -> dict[str, Tensor]:
        """What `pieces` has, and each parameter's number of updates."""
        return {**self._narrow.tensors(), **self._others.tensors()}

    def state(self) -> dict[str, Any]:
        """``{"name": "adamw_8bit", "step": updates done}``."""
        return self._narrow.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back the number of updates."""
        self._narrow.load_state(state)
        self._others.load_state(state)


class _Narrow(PerParameter):
    """The parameters whose moments are in 8 bits."""

    config: AdamW8bitConfig
    NAME: ClassVar[str] = "adamw_8bit"

    def _kept(self, parameter: ShardedParameter, local: Tensor) -> dict[str, Shape]:
        block = self.config.block
        codes = Shape(tuple(local.shape), torch.uint8)
        scales = Shape((*local.shape[:-1], blocks(local.shape[-1], block)), wide(local))
        return {
            "exp_avg": codes,
            "exp_avg_scale": scales,
            "exp_avg_sq": codes,
            "exp_avg_sq_scale": scales,
        }

    def _layout(self, kind: str, layout: Layout) -> Layout:
        if not kind.endswith("_scale"):
            return layout
        found = scale_layout(layout, self.config.block)
        assert found is not None, "checked when the state was made"
        return found

    def _update(self, held: Held, grad: Tensor, lr: float | Tensor) -> None:
        kept, block, count = held.kept, self.config.block, held.count
        assert count is not None, "AdamW counts updates"
        (first, second), dtype = self.config.betas, kept["exp_avg_scale"].dtype
        g = grad.to(dtype)
        m = dequantized(kept["exp_avg"], kept["exp_avg_scale"], block, signed=True) * first + g * (1 - first)
        v = dequantized(kept["exp_avg_sq"], kept["exp_avg_sq_scale"], block, signed=False) * second
        v = v + g.square() * (1 - second)
        corrected = v.sqrt() / (1 - torch.pow(second, count)).sqrt().to(dtype) + self.config.eps
        move(held, m / (1 - torch.pow(first, count)).to(dtype) / corrected, lr, self._decay(held))
        for kind, moment, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
            codes, scales = quantized(moment, block, signed)
            kept[kind].copy_(codes)
            kept[f"{kind}_scale"].copy_(scales)


def _elements(parameter: ShardedParameter) -> int:
    return torch.Size(parameter.layout.shape).numel()


def _check_blocks(parameters: Sequence[ShardedParameter], block: int) -> None:
    refused = next((p for p in parameters if scale_layout(p.layout, block) is None), None)
    if refused is None:
        return
    smaller = block // 2
    while smaller >= SMALLEST_BLOCK and any(scale_layout(p.layout, smaller) is None for p in parameters):
        smaller //= 2
    mend = f"set train.optimizer.block={smaller}, or " if smaller >= SMALLEST_BLOCK else ""
    raise StrategyError(
        f"adamw_8bit: {refused.name!r} is laid out as {refused.layout}, which splits rows inside blocks of {block} "
        f"elements; {mend}choose another degree of the axis, or train.optimizer.name=adamw"
    )


# Block-wise quantization to 8 bits with a dynamic map (Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2).
#
# Each block of consecutive elements of a row is divided by its largest magnitude, its scale, and every element becomes
# the index of the nearest of 256 values. The map has seven decades, each twice as finely divided as the one below, so
# that small elements keep relative precision. With a map of both signs:
#
#     q = argmin_i |x / s − map_i|,  s = max |x| over the block              `quantized`
#     x ≈ s · map_q                                                          `dequantized`
#
# A row's last block may be shorter. Blocks lie along the last dim only, so a tensor that is split along other dims, or
# between blocks, has the codes and scales of the whole one (`scale_layout`).

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
