"""Expert dispatch: dropless all-to-all of tokens to experts and back.

Each rank has T tokens, k experts chosen for each, and the weights of E/n of the E experts; n is the degree of the
expert axis:

1. the T · k rows are sorted by expert, and so by owner;
2. the owners learn how many rows of each expert come from whom (an even all-to-all of E counts), and the host
   learns the counts that the next exchange needs: the one time that it waits for the device;
3. the rows travel (an uneven all-to-all) and are grouped by local expert;
4. the experts compute, and rows travel back and into their places.

This is the exchange of GShard (arXiv 2006.16668) without its capacity, as in MegaBlocks (arXiv 2211.15841).

A hot expert can have replicas: its weights are summed to every rank of the axis, where only the owner contributes,
and its rows are computed where they are (dynamic shadowing of FasterMoE, PPoPP'22, section 4.2). The gradient of the
replicas is summed to the owner.

Which rank owns which expert, and which experts have replicas, is data (`shard.experts.placement`): step 1 then sorts by
place, and all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.compat import collectives
from hyper_parallel.compat.fx_graph import is_symbolic
from hyper_parallel.compat.local_tensor import per_rank, per_rank_int
from hyper_parallel.graph.dynamic_sizes import expected
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.experts.placement import Places
from hyper_parallel.shard.mesh_axis import Axis, _Moved

Weights = Mapping[str, torch.Tensor]


class RowCounts(NamedTuple):
    """How many rows an exchange moves."""

    send: list[int]
    """To each rank."""
    receive: list[int]
    """From each rank."""
    groups: list[int]
    """To each of this rank's experts."""
    hot: list[int]
    """To each replica, which stay."""


def compute(
    module: nn.Module,
    weights: Weights,
    x: torch.Tensor,
    ids: torch.Tensor,
    expert: Axis,
    experts: int,
    places: Places | None = None,
) -> torch.Tensor:
    """[T, h] and int64[T, k] to [T, k, h]: what each chosen expert makes of each token.

    `weights` hold this rank's experts, `experts` / `expert.size` of them, by parameter name, in order of their
    `places`; None is the model's own order, without replicas.
    """
    if current_step().widest_spread:
        # Those of one rank, as far as they suffice: no choice sends it more rows.
        ids = torch.arange(ids.size(1), device=ids.device, dtype=ids.dtype).expand_as(ids)
    keys = ids.flatten()
    if places is not None:
        keys = places.keys[keys]
    replicas = None if places is None or not places.replicas.size(0) else places.replicas
    order = torch.argsort(keys, stable=True)
    back = _inverse(order)
    tokens, k, features = x.size(0), ids.size(1), x.size(1)
    # Each token once for each of its experts.
    rows = _moved(x, lambda x: x[order // k], lambda g: g[back].view(tokens, k, features).sum(1))
    exchange = _Exchange(expert, experts, replicas)
    counts = count(keys, experts + exchange.hot)
    if expert.size == 1:
        even = evenly(rows.size(0), experts)
        if current_step().even_load is not None:
            groups = even
        else:
            groups = counts.tolist()
            expected(groups, even, scales=False)
        computed = apply_experts(module, weights, rows, groups)
    else:
        computed = exchange(module, weights, rows, counts)
    return _permute(computed, back, order).view(tokens, k, features)


def count(keys: torch.Tensor, bins: int) -> torch.Tensor:
    """int64[bins]: how often each number occurs. Unlike ``bincount`` it does not wait for the device."""
    zeros = torch.zeros(bins, dtype=torch.int64, device=keys.device)
    return zeros.scatter_add(0, keys, torch.ones_like(keys))


def evenly(rows: int, bins: int) -> list[int]:
    """`rows` spread over `bins` as evenly as they go; the first ones have one more."""
    return [rows // bins + (at < rows % bins) for at in range(bins)]


@dataclass(frozen=True)
class _Exchange:
    """The exchange of rows over the expert axis."""

    expert: Axis
    experts: int
    replicas: torch.Tensor | None
    """int64[K]: the places of the experts that have replicas."""

    @property
    def hot(self) -> int:
        """The number of replicas."""
        return 0 if self.replicas is None else self.replicas.size(0)

    @property
    def local(self) -> int:
        """The number of experts that a rank has."""
        return self.experts // self.expert.size

    def __call__(
        self, module: nn.Module, weights: Weights, rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """[R, h] to [R, h]: rows sorted by expert, those of replicas last, through the experts of all ranks."""
        n, expert = self.expert.size, self.expert
        leaving = counts[: self.experts].view(n, self.local)
        arriving = collectives.all_to_all(leaving, [1] * n, [1] * n, expert.group)
        # Before the numbers are read, after which there is memory for as many rows.
        report = current_step().report_load
        if report is not None:
            likely = sum(self._evenly(rows.size(0), 1.0).receive)
            report((arriving.sum().float() / max(likely, 1)).view(1))
        numbers = torch.cat([leaving.sum(1), arriving.sum(1), arriving.sum(0), counts[self.experts :]])
        send, receive, groups, hot = self._read(numbers, rows.size(0))
        away = rows if self.replicas is None else rows.narrow(0, 0, sum(send))

        arrived = expert.exchange(away, send, receive)
        labels = torch.arange(self.local, device=rows.device).repeat(n)
        labels = labels.repeat_interleave(arriving.flatten(), output_size=sum(receive))
        order = torch.argsort(labels, stable=True)
        back = _inverse(order)
        computed = apply_experts(module, weights, _permute(arrived, order, back), groups)
        returned = expert.exchange(_permute(computed, back, order), receive, send)
        if self.replicas is None:
            return returned
        copies = {name: self._replicated(weight, self.replicas) for name, weight in weights.items()}
        here = apply_experts(module, copies, rows.narrow(0, sum(send), sum(hot)), hot)
        return torch.cat([returned, here])

    def _read(self, numbers: torch.Tensor, rows: int) -> RowCounts:
        """The rows of an exchange, once the host has waited."""
        load, n = current_step().even_load, self.expert.size
        if load is not None:
            return self._evenly(rows, load)
        whole = numbers.tolist()
        parts = []
        for size in (n, n, self.local, self.hot):
            parts.append(whole[:size])
            whole = whole[size:]
        if any(map(is_symbolic, parts[0])):
            even = self._evenly(rows, 1.0)
            # What leaves is certain, but for what stays with replicas; from each rank no more comes than it has.
            limits = (rows, n * rows, n * rows, rows)
            for part, likely, scales, most in zip(
                parts, even, (False, True, True, False), limits, strict=True
            ):
                expected(part, likely, scales, most)
        return RowCounts(*parts)

    def _evenly(self, rows: int, load: float) -> RowCounts:
        """What `_read` gives if the rows of every rank were spread evenly over the experts, and this rank's were `load`
        times as popular."""
        n, local = self.expert.size, self.local
        counts = evenly(rows, self.experts + self.hot)
        send = [sum(counts[at * local : (at + 1) * local]) for at in range(n)]
        come = round(send[per_rank_int(self.expert.index)] * load)
        return RowCounts(send, [come] * n, evenly(n * come, local), counts[self.experts :])

    def _replicated(self, weight: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
        """[E / n, ...] to [K, ...]: the weights of the experts at these places, from their owners."""
        expert, local = self.expert, weight.size(0)
        first = per_rank(lambda rank: torch.tensor(expert.index(rank) * local, device=weight.device))
        index = replicas - first
        owned = (index >= 0) & (index < local)
        mine = weight.index_select(0, index.clamp(0, local - 1))
        mine = mine.masked_fill(~owned.view(-1, *[1] * (weight.dim() - 1)), 0)
        # Each rank uses the sum for its own rows, so the gradient is summed over the ranks too.
        return expert.copy(expert.reduce(mine))


# Rows in another order, with backward passes that add nothing up in an order of chance.


def _inverse(order: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(order.size(0), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def _permute(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    return _moved(x, lambda x: x[order], lambda g: g[back])


def _moved(
    x: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    return _Moved.apply(x, forward, backward)  # type: ignore[no-any-return]


# Grouped matrix products: expert MLPs on rows sorted by expert.
#
#     y_r = down_e · gate(up_e · x_r + b_e) + b'_e        for each row r of the group of expert e
#
# Each group is one matrix product of the rows that there are, in any dtype. A group without rows takes part as a
# product of zero rows, so that its weights get a gradient of zero and not none. All groups are one operator, so that a
# graph has one node for any number of experts, and only the number of all rows is a size of its tensors:
#
#     out   = grouped_mm(rows, W)                [R, k] · [E, k, n] -> [R, n]
#     d rows = grouped_mm(d out, Wᵀ)             [R, n] · [E, n, k] -> [R, k]
#     d W   = grouped_mm(rowsᵀ, d out)           [k, R] · [R, n]    -> [E, k, n]

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
        # The most for this number of rows: each expert that has any is one row over a multiple.
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
