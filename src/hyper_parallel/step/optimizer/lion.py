"""Lion (Chen et al. 2023, arXiv 2302.06675, Program 1): the sign of an interpolated momentum.

    u = sign(β₁ m + (1 − β₁) g)
    p ← p − lr · λ p − lr · u
    m ← β₂ m + (1 − β₂) g

The update is elementwise, so a rank updates the elements that it holds and nothing is communicated. The momentum has
the parameter's dtype and layout.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LionConfig
from hyper_parallel.shard import ShardedParameter
from hyper_parallel.step.optimizer.per_parameter import Held, PerParameter, Shape, move, wide


class Lion(PerParameter):
    """Lion over the local tensors of `parameters`."""

    config: LionConfig
    NAME: ClassVar[str] = "lion"
    COUNTS: ClassVar[bool] = False

    @classmethod
    def of(cls, model: nn.Module, parameters: list[ShardedParameter], config: LionConfig) -> Lion:
        """Lion for a parallelized model."""
        return cls(parameters, config)

    def _kept(self, parameter: ShardedParameter, local: Tensor) -> dict[str, Shape]:
        return {"exp_avg": Shape(tuple(local.shape), local.dtype)}

    def _update(self, held: Held, grad: Tensor, lr: float | Tensor) -> None:
        momentum, (first, second) = held.kept["exp_avg"], self.config.betas
        dtype = wide(held.local)
        g, m = grad.to(dtype), momentum.to(dtype)
        move(held, torch.sign(m * first + g * (1 - first)), lr, self._decay(held))
        momentum.copy_(m * second + g * (1 - second))
