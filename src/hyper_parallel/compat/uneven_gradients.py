"""Gradients of DTensors whose shards differ in size.

PyTorch takes the strides of the whole gradient from one shard, and copies it where they differ from the parameter's:
into shards of the sizes that it expects, which are not those of a fused weight. PyTorch 2.11 gathers them there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local_for_compute(parameter: DTensor) -> torch.Tensor:
    """The shard of a parameter; its gradient has the parameter's placements, shape and strides."""
    local: torch.Tensor = _Local.apply(parameter)
    return local


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.whole = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.whole
        return DTensor.from_local(
            gradient.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )


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
