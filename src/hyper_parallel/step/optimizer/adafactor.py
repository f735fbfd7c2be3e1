"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5), with Transformers' conventions.

    β = 1 − t^c                                                c = decay_rate, t counts updates from 1
    R ← β R + (1 − β) mean over columns (g² + ε₁)              of each row
    C ← β C + (1 − β) mean over rows (g² + ε₁)                 of each column
    u = g / √(R Cᵀ / mean R)
    u ← u / max(1, RMS(u) / d)                                 d = clip_threshold
    p ← p − lr · s (λ p + u)                                   s = max(ε₂, RMS(p)) under scale_parameter, else 1

A parameter of fewer than two dims keeps the whole second moment V in the place of R and C. One of more than two dims is
a batch of matrices, whose RMS is that of the batch.

**On several ranks** every mean and RMS goes over the whole parameter: sums of a rank's own elements are added up over
the axes that split the dim in question, and divided by the dim's whole length. R lies as the parameter without its last
dim, C as the parameter without the dim before. A split matrix costs up to four small all-reduces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from hyper_parallel.config.train import AdafactorConfig
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedModel, ShardedParameter, sharded
from hyper_parallel.step.optimizer.per_parameter import Held, PerParameter, Shape, move, wide


class Adafactor(PerParameter):
    """Adafactor over `parameters`."""

    config: AdafactorConfig
    NAME: ClassVar[str] = "adafactor"

    def __init__(
        self, parameters: Sequence[ShardedParameter], config: AdafactorConfig, handle: ShardedModel
    ) -> None:
        super().__init__(parameters, config)
        self._handle = handle

    @classmethod
    def of(cls, model: nn.Module, parameters: list[ShardedParameter], config: AdafactorConfig) -> Adafactor:
        """Adafactor for a parallelized model."""
        return cls(parameters, config, sharded(model))

    def _kept(self, parameter: ShardedParameter, local: Tensor) -> dict[str, Shape]:
        dtype, shape = wide(local), tuple(local.shape)
        if len(shape) < 2:
            return {"exp_avg_sq": Shape(shape, dtype)}
        return {
            "exp_avg_sq_row": Shape(shape[:-1], dtype),
            "exp_avg_sq_col": Shape((*shape[:-2], shape[-1]), dtype),
        }

    def _layout(self, kind: str, layout: Layout) -> Layout:
        if kind == "exp_avg_sq":
            return layout
        return layout.without_dim(len(layout.shape) - (1 if kind == "exp_avg_sq_row" else 2))

    def _update(self, held: Held, grad: Tensor, lr: float | Tensor) -> None:
        layout, config = held.parameter.layout, self.config
        assert held.count is not None, "Adafactor counts updates"
        g = grad.to(wide(held.local))
        squares = g.square() + config.eps[0]
        # 1 − β, the share of what is new.
        fresh = held.count.pow(config.decay_rate).to(g.dtype)
        if g.dim() < 2:
            second = held.kept["exp_avg_sq"]
            second.copy_(second + (squares - second) * fresh)
            update = g * second.rsqrt()
        else:
            rows, columns = held.kept["exp_avg_sq_row"], held.kept["exp_avg_sq_col"]
            rows.copy_(rows + (self._mean(squares, layout, -1) - rows) * fresh)
            columns.copy_(columns + (self._mean(squares, layout, -2) - columns) * fresh)
            over_rows = self._mean(rows, layout.without_dim(len(layout.shape) - 1), -1)
            of_row = (rows / over_rows.unsqueeze(-1)).rsqrt().unsqueeze(-1)
            update = g * of_row * columns.rsqrt().unsqueeze(-2)
        update = update / (self._rms(update, layout) / config.clip_threshold).clamp(min=1.0)
        if config.scale_parameter:
            scale = self._rms(held.local.to(g.dtype), layout).clamp(min=config.eps[1])
            decay = self._decay(held)
            if decay:
                update = update + held.local.to(g.dtype) * decay
            move(held, update * scale, lr, 0.0)
        else:
            move(held, update, lr, self._decay(held))

    def _mean(self, tensor: Tensor, layout: Layout, dim: int) -> Tensor:
        """The mean over a dim of the whole tensor, which lies as `layout` says."""
        return self._handle.all_reduce(tensor.sum(dim), layout.dims[dim]) / layout.shape[dim]

    def _rms(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The root mean square of the whole tensor: zero-dim."""
        total = self._handle.all_reduce(tensor.square().sum(), layout.split_axes)
        return (total / math.prod(layout.shape)).sqrt()
