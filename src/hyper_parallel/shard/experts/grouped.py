"""The experts' own arithmetic on rows that lie sorted by expert: two grouped matrix products and what is between.

    y_r = down_e · gate(up_e · x_r + b_e) + b'_e        for each row r of the group of expert e

Each group is one matrix product of the rows that there are, in any dtype. A group without rows takes part as a
product of zero rows, so that its weights get a gradient of zero and not none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, counts: list[int], bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """[sum(counts), in] to [sum(counts), out]: the first counts[0] rows by weight[0], and so on.

    `weight` [E, out, in], or [E, in, out] when `transposed`; `bias` [E, out].
    """
    # Taken apart at once: the gradients of the parts are put together in one piece, where a selection of one
    # expert would make a gradient of all experts' size each.
    weights = weight.unbind(0)
    biases = bias.unbind(0) if bias is not None else (None,) * len(weights)
    parts = [
        nn.functional.linear(x, w.t() if transposed else w, b)
        for x, w, b in zip(rows.split(counts), weights, biases, strict=True)
    ]
    return torch.cat(parts)


def apply_experts(
    module: nn.Module, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """[R, h] to [R, h]: rows sorted by expert through the experts of which `weights` has the parameters by name."""
    experts: Any = module
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = grouped_linear(rows, weights[up], counts, weights.get(f"{up}_bias"), experts.is_transposed)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = grouped_linear(
        inner, weights["down_proj"], counts, weights.get("down_proj_bias"), experts.is_transposed
    )
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out
