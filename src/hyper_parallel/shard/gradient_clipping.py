"""Gradient norm and clipping across meshes: one norm over all parameters, whatever their layouts.

norm² = Σ over parameters: (Σ over ranks: ‖local gradient‖²) / copies        copies: ranks that hold the same elements
clipped = gradient · min(1, max_norm / (norm + 1e-6))                        as torch.nn.utils.clip_grad_norm_
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hyper_parallel.compat.foreach_kernels import scale_, sum_of_squares
from hyper_parallel.layout.layout import Layout


class HasGradient(Protocol):
    """A parameter's local shard."""

    @property
    def layout(self) -> Layout:
        """How the parameter is split."""

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's shard of the gradient."""


def gradient_norm(
    parameters: Iterable[HasGradient], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The 2-norm of the whole gradient, fp32 []; `reduce` sums over all ranks of the mesh."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    total = torch.zeros(())
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            by_copies.setdefault(parameter.layout.copies, []).append(gradient)
    for copies, gradients in sorted(by_copies.items()):
        total = total.to(gradients[0].device) + sum_of_squares(gradients) / copies
    return reduce(total).sqrt()


def clip_gradients(parameters: Iterable[HasGradient], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm, given as `norm`, is at most `max_norm`."""
    gradients = [g for g in (parameter.grad for parameter in parameters) if g is not None]
    scale_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
