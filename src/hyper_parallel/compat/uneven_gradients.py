"""Gradients of DTensors whose shards differ in size: PyTorch 2.11 gathers them where they are accumulated."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def keep_gradient_sharded(parameter: nn.Parameter) -> None:
    """Have a DTensor's gradient in the placements of its values, as newer releases have it."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_sharded)


def _sharded(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        # From whole tensors to shards: nothing is sent.
        parameter.grad = gradient.redistribute(placements=parameter.placements)
