"""Grouped matrix products: expert MLPs on rows sorted by expert.

    y_r = down_e · gate(up_e · x_r + b_e) + b'_e        for each row r of the group of expert e

Each group is one matrix product of the rows that there are, in any dtype. A group without rows takes part as a
product of zero rows, so that its weights get a gradient of zero and not none. All groups are one operator, so that a
graph has one node for any number of experts, and only the number of all rows is a size of its tensors:

    out   = grouped_mm(rows, W)                [R, k] · [E, k, n] -> [R, n]
    d rows = grouped_mm(d out, Wᵀ)             [R, n] · [E, n, k] -> [R, k]
    d W   = grouped_mm(rowsᵀ, d out)           [k, R] · [R, n]    -> [E, k, n]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hyper_parallel.graph.step_context import current_step

_library = torch.library.Library("hyper_parallel", "FRAGMENT")
_library.define("grouped_mm(Tensor a, Tensor b, SymInt[] counts, Tensor? bias=None) -> Tensor")
_library.define("grouped_sum(Tensor rows, SymInt[] counts) -> Tensor")


def _shape(a: torch.Tensor, b: torch.Tensor, counts: Sequence[int]) -> tuple[int, ...]:
    return (a.size(0), b.size(2)) if b.dim() == 3 else (len(counts), a.size(0), b.size(1))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = a.new_empty(_shape(a, b, counts))
    groups = list(counts)
    if b.dim() == 2:
        for x, y, into in zip(a.split(groups, 1), b.split(groups), out.unbind(0), strict=True):
            torch.mm(x, y, out=into)
        return out
    biases = (None,) * len(groups) if bias is None else bias.unbind(0)
    for x, y, z, into in zip(a.split(groups), b.unbind(0), biases, out.split(groups), strict=True):
        if z is None:
            torch.mm(x, y, out=into)
        else:
            torch.addmm(z, x, y, out=into)
    return out


def _grouped_sum(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch.stack([x.sum(0) for x in rows.split(list(counts))])


_library.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_library.impl("grouped_mm", lambda a, b, counts, bias=None: a.new_empty(_shape(a, b, counts)), "Meta")
_library.impl("grouped_sum", _grouped_sum, "CompositeExplicitAutograd")
_library.impl("grouped_sum", lambda rows, counts: rows.new_empty(len(counts), rows.size(1)), "Meta")
_ops = torch.ops.hyper_parallel


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, counts, transposed):  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.transposed = counts, transposed
        return _ops.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), counts, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def,override]
        rows, weight = ctx.saved_tensors
        counts, transposed = ctx.counts, ctx.transposed
        wanted = ctx.needs_input_grad
        gradient = gradient.contiguous()
        of_rows = of_weight = of_bias = None
        if wanted[0]:
            of_rows = _ops.grouped_mm(gradient, weight.transpose(1, 2) if transposed else weight, counts)
        if wanted[1]:
            left, right = (rows, gradient) if transposed else (gradient, rows)
            of_weight = _ops.grouped_mm(left.t(), right, counts)
        if wanted[2]:
            of_bias = _ops.grouped_sum(gradient, counts)
        return of_rows, of_weight, of_bias, None, None


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, counts: list[int], bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """[sum(counts), in] to [sum(counts), out]: the first counts[0] rows by weight[0], and so on.

    `weight` [E, out, in], or [E, in, out] when `transposed`; `bias` [E, out].
    """
    return _GroupedLinear.apply(rows, weight, bias, counts, transposed)  # type: ignore[no-any-return,no-untyped-call]


def apply_experts(
    module: nn.Module, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """[R, h] to [R, h]: apply the experts to rows sorted by expert, `counts` rows each; `weights` by parameter name."""
    multiple = current_step().expert_rows
    if multiple == 1:
        return _applied(module, weights, rows, counts)
    filled = [-(-count // multiple) * multiple for count in counts]
    if current_step().widest_spread:
        # The most for so many rows: each expert that has any is one row over a multiple.
        most = rows.size(0) + min(len(counts), rows.size(0)) * (multiple - 1)
        filled[0] += max(most // multiple * multiple - sum(filled), 0)
    starts = accumulate(filled, initial=0)
    places = torch.tensor(
        [start + row for start, count in zip(starts, counts, strict=False) for row in range(count)],
        dtype=torch.int64,
        device=rows.device,
    )
    larger = rows.new_zeros(sum(filled), rows.size(1)).index_copy(0, places, rows)
    return _applied(module, weights, larger, filled)[places]


def _applied(
    module: nn.Module, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    experts: Any = module
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = grouped_linear(rows, weights[up], counts, weights.get(f"{up}_bias"), experts.is_transposed)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = grouped_linear(
        inner, weights["down_proj"], counts, weights.get("down_proj_bias"), experts.is_transposed
    )
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
