"""Steps that are computed in two ways from the same weights: losses, gradients and seconds beside each other.

Part of `balanced_rows.py` and `dynamic_steps.py`: each step is computed as given and in another way, in turns, before
the weights move on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Way = Callable[[int], tuple[dict[str, float], dict[str, Tensor]]]
"""A step by its number: its figures, with the loss, and this rank's gradients by name."""


def steps_both_ways(
    ways: Mapping[str, Way], optimizer: torch.optim.Optimizer, steps: int
) -> list[dict[str, float]]:
    """The figures of each step as ``name, way``, and the largest difference of gradients over the largest gradient of
    the first way. The way that goes first alternates; weights move by the gradients of the last."""
    given, other = ways
    found = []
    for step in range(steps):
        row: dict[str, float] = {}
        gradients: dict[str, dict[str, Tensor]] = {}
        for name in (given, other) if step % 2 else (other, given):
            optimizer.zero_grad()
            figures, of_step = ways[name](step)
            row |= {f"{figure}, {name}": value for figure, value in figures.items()}
            gradients[name] = {key: value.clone() for key, value in of_step.items() if value.numel()}
        largest = max(float(value.abs().max()) for value in gradients[given].values())
        row["gradients"] = max(
            float((value - gradients[other][key]).abs().max()) / largest
            for key, value in gradients[given].items()
        )
        optimizer.step()
        found.append(row)
    return found


def differences(
    ranks: Sequence[Sequence[Mapping[str, float]]], given: str, other: str, first: int = 0
) -> dict[str, Any]:
    """What the ways differ by at most, and the first and last losses, of steps from `first` on."""
    rows = ranks[0][first:]
    losses = [(row[f"loss, {given}"], row[f"loss, {other}"]) for row in rows]
    return {
        "loss_difference": max(abs(a - b) / a for a, b in losses),
        "gradient_difference": max(row["gradients"] for rank in ranks for row in rank),
        "first_loss": losses[0][0],
        "last_loss": losses[-1][0],
    }
