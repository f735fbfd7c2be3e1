"""Whether the rows of a call depend on each other, or on what it writes, in a module called as its user calls it.

A second call is drawn in the same shapes, and both are computed one by one, and as one call of twice the rows. So each
pass has as many rows as the user gives, or more: batch statistics of one row raise errors of their own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.pytree import leaves_of, mapped
from hyper_parallel.shard.owner_check.comparisons import ALONE, Comparison, decided, without_dropout
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.region_check.check import quiet
from hyper_parallel.shard.region_check.outcome import TOLERANCE, Outcome
from hyper_parallel.shard.region_check.reduced_model import reduce
from hyper_parallel.shard.region_check.sample_inputs import SeenCall


def compare_rows(original: nn.Module, call: SeenCall, count: int | None) -> Comparison:
    """Compare the call's rows alone with the same beside others, on a copy with random values.

    `count`: the number of rows, where it is known; else it is the first dim of the first tensor.
    """
    first = next(
        (x for x in leaves_of((call.args, dict(call.kwargs))) if isinstance(x, Tensor) and x.dim()), None
    )
    if first is None:
        return Comparison("not applicable", "the call has no tensor with rows")
    count = first.size(0) if count is None else count
    if count not in first.shape:
        return Comparison("not applicable", f"no dim of the first tensor has the {count} rows of the batch")
    dim = first.shape.index(count)
    other = SeenCall.of(call.args, call.kwargs, seed=1)
    together = _joined(call, other, count, dim)
    with quiet():
        for small in reduce(original, make_plan(original, ALONE), ALONE):
            template = without_dropout(small.model)
            modes = {name: module.training for name, module in original.named_modules()}
            for name, module in template.named_modules():
                module.training = modes.get(name, module.training)
            values = copy.deepcopy(template)
            found = decided(
                lambda precise, template=template: _outcomes(  # type: ignore[misc]
                    template.to(torch.float64) if precise else template, (call, other), together, dim
                )
            )
            if found.verdict == "right" and (name := _written_from_rows(values, (call, other, together))):
                return Comparison("differs", "it writes from its rows", written=name)
            return found
    return Comparison("not applicable", "no copy of it is small enough")


def _written_from_rows(template: nn.Module, calls: tuple[SeenCall, ...]) -> str:
    """The first weight or buffer that calls with other rows leave with other values; empty where there is none."""
    after: list[dict[str, Tensor]] = []
    for call in calls:
        module = copy.deepcopy(template)
        with torch.no_grad():
            module(*call.args, **dict(call.kwargs))
        after.append(dict([*module.named_parameters(), *module.named_buffers()]))
    first, *others = after
    for name, value in first.items():
        for other in others:
            # What grows with the rows is a table, no state.
            if name in other and other[name].shape == value.shape and not _close(value, other[name]):
                return name
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _joined(call: SeenCall, other: SeenCall, count: int, dim: int) -> SeenCall:
    """Both calls as one: every tensor that has the rows in this dim has those of both."""
    others = iter(leaves_of((other.args, dict(other.kwargs))))

    def both(leaf: Any) -> Any:
        second = next(others)
        if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.size(dim) == count:
            return torch.cat([leaf, second], dim)
        return leaf

    return SeenCall(*mapped(both, (call.args, dict(call.kwargs))))


def _outcomes(
    template: nn.Module, calls: tuple[SeenCall, SeenCall], together: SeenCall, dim: int
) -> tuple[Outcome, Outcome]:
    first, second = (_outputs(template, call) for call in calls)
    whole = _outputs(template, together)
    alone, beside = dict[str, Tensor](), dict[str, Tensor]()
    for at, (a, b, both) in enumerate(zip(first, second, whole, strict=True)):
        if a.dim() > dim and both.shape == torch.cat([a, b], dim).shape:
            alone[f"output {at}"], beside[f"output {at}"] = torch.cat([a, b], dim), both
    if not alone:
        # Losses: those of more rows are the mean of the losses, or their sum.
        for at, (a, b, both) in enumerate(zip(first, second, whole, strict=True)):
            if both.shape == a.shape:
                total = a + b
                nearer = float((total - both).abs().max()) < float((total / 2 - both).abs().max())
                alone[f"output {at}"], beside[f"output {at}"] = total if nearer else total / 2, both
    return Outcome(0.0, alone), Outcome(0.0, beside)


def _outputs(template: nn.Module, call: SeenCall) -> list[Tensor]:
    """The floating-point tensors that a fresh copy returns."""

    def wide(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.get_default_dtype()) if floating else leaf

    args, kwargs = mapped(wide, (call.args, dict(call.kwargs)))
    with torch.no_grad():
        output = copy.deepcopy(template)(*args, **kwargs)
    return [x for x in leaves_of(output) if isinstance(x, Tensor) and x.is_floating_point()]
