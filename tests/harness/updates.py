"""How far two runs of AdamW may be apart whose gradients differ by rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


def gradients_of(model: nn.Module) -> Tensors:
    """Copies of a model's gradients, by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adamw_error(
    mine: Sequence[Tensors], theirs: Sequence[Tensors], *, lr: float, betas: tuple[float, float], eps: float
) -> Tensors:
    """How far each element may be apart after steps with the gradients `mine` on one side, `theirs` on the other.

    An update is u = m / (s + ε), where m is a mean of the gradients gᵢ, weighted, and s the root of a weighted mean of
    their squares, which is a norm. Where no gᵢ differs by more than r, neither does m, and by the triangle inequality
    neither does s. With s' of the other side

        u' − u = (m' − m) / (s' + ε) − u (s' − s) / (s' + ε),   so   |u' − u| ≤ r (1 + |u|) / (s' + ε)

    and the steps' errors add up to lr times their sum. Where gradients are next to nothing, this is r / ε.
    """
    found = {}
    for name in theirs[0]:
        gradients = [
            (ours[name].double(), others[name].double()) for ours, others in zip(mine, theirs, strict=True)
        ]
        first = second = of_mine = rounding = total = torch.zeros_like(gradients[0][0])
        for step, (ours, others) in enumerate(gradients, 1):
            first = torch.lerp(others, first, betas[0])
            second = torch.lerp(others.square(), second, betas[1])
            of_mine = torch.lerp(ours.square(), of_mine, betas[1])
            corrected = [1 - beta**step for beta in betas]
            update = first / corrected[0] / ((second / corrected[1]).sqrt() + eps)
            rounding = torch.maximum(rounding, (ours - others).abs())
            total = total + rounding * (1 + update.abs()) / ((of_mine / corrected[1]).sqrt() + eps)
        found[name] = lr * total
    return found
