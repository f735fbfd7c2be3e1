"""Gradient norm and clipping across meshes: one norm over all parameters, whatever their layouts.

    norm² = Σ over parameters: (Σ over ranks: ‖local gradient‖²) / copies                        `gradient_norm`
    clipped = gradient · min(1, max_norm / (norm + 1e-6))                                        `clip_gradients`

`copies` counts the ranks that hold the same elements; the factor is that of torch.nn.utils.clip_grad_norm_. Eager and
captured steps, and the `clip_grad_norm_` of the integrations, compute the norm and clip with these two functions.
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


def clip_gradients(
    gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float, *, in_graph: bool = False
) -> None:
    """Scale gradients in place so that their norm, given as `norm`, is at most `max_norm`.

    `in_graph`: the step is being captured. The comparison with the limit, which an eager step makes on the host, is
    then an operator of the device, and a separate operator scales each gradient, so that `graph.host_update` can move
    it together with that parameter's update.
    """
    if not in_graph:
        # A stage of a pipeline may have nothing that is trained.
        if found := list(gradients):
            scale_(found, _factor(norm, max_norm))
        return
    factor = torch.where(norm > max_norm, _factor(norm, max_norm), torch.ones_like(norm))
    for gradient in gradients:
        gradient.mul_(factor)


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
