"""Gradients in a captured step: their layout, the sums over micro-batches, and those of weights that stages share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph.dependencies import Needs, needed, seen_through, sources, stops
from hyper_parallel.graph.ir import StepGraph, Storage, Value, is_collective, is_wait


def owned(gradient: torch.Tensor, like: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient, or a copy of it, that may be written to.

    It has the strides of `like`, but for an expanded one, whose elements lie in one place, and a storage whose address
    is not in `taken`, to which it is added.
    """
    gradient = gradient.detach()
    expanded = any(size > 1 and not step for size, step in zip(like.shape, like.stride(), strict=True))
    strides = torch.empty(like.shape, device="meta").stride() if expanded else like.stride()
    if gradient.stride() != strides or _address(gradient) in taken:
        gradient = torch.empty_strided(
            like.shape, strides, dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    taken.add(_address(gradient))
    return gradient


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# Gradient sums: the values at which a step is cut into what each micro-batch computes, and what runs once.
#
# A captured micro-batch returns each gradient as it is after all reductions, and the values at which reductions could
# be cut off: ``gradient.unreduced:<n>`` before the reduction over shards, ``gradient.unsummed:<n>`` before the sum over
# copies. A value may be added up over micro-batches if what is computed from it until the gradient is linear, which
# reductions are, and if nothing else goes into that gradient.

GRADIENT = "gradient."
"""How the outputs that are gradients begin."""
UNREDUCED, UNSUMMED = f"{GRADIENT}unreduced:", f"{GRADIENT}unsummed:"
"""How gradients begin that are not reduced over shards, or not summed over copies."""


@dataclass(frozen=True)
class GradientSums:
    """Sums over the micro-batches of a step."""

    sums: Mapping[str, fx.Node]
    """Gradients before reductions that run once a step, by name."""
    reduced: Mapping[str, tuple[fx.Node, ...]]
    """Parameter to the parts of its gradient, each computed from `sums` alone. Others are added up as they are."""


def gradient_sums(
    returned: Mapping[str, fx.Node],
    parts: Mapping[str, Sequence[fx.Node]],
    needs: Needs,
    early: Callable[[str], bool],
) -> GradientSums:
    """The cut of a micro-batch that returns these values.

    `parts`: of each gradient, the summands that are to be kept apart; `needs`: the data flow; `early`: whether the
    reduction over shards of an unreduced gradient runs once a step too.
    """
    found = {
        name: seen_through(node)
        for name, node in returned.items()
        if name.startswith(UNREDUCED) and early(name)
    }
    behind = _behind(found.values())
    found |= {
        name: seen_through(node)
        for name, node in returned.items()
        if name.startswith(UNSUMMED) and node not in behind
    }
    ends = set(found.values())
    stop = stops(needs, ends)
    reduced = {
        name.removeprefix(GRADIENT): tuple(nodes)
        for name, nodes in parts.items()
        if name.startswith(GRADIENT)
        and not name.startswith((UNREDUCED, UNSUMMED))
        and all(_only_reduces(needs, part, ends, stop) for part in nodes)
    }
    flat = [part for nodes in reduced.values() for part in nodes]
    used = sources(needed(needs, flat, stop)) | set(flat)
    return GradientSums({name: node for name, node in found.items() if node in used}, reduced)


def _behind(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes and what is computed from them."""
    found, left = set(nodes), list(nodes)
    while left:
        more = [user for user in left.pop().users if user not in found]
        found.update(more)
        left += more
    return found


def _only_reduces(needs: Needs, part: fx.Node, ends: set[fx.Node], stop: Collection[fx.Node]) -> bool:
    """Whether a part of a gradient is computed from the ends alone."""
    if part in ends:
        return True
    left, seen, met = [part], {part}, False
    while left:
        node = left.pop()
        for source in node.all_input_nodes:
            met = met or source in ends
            # Nearly all parts that are no reductions come to a weight or the batch soon.
            if source not in ends and source not in stop and source not in needs:
                return False
        more = [source for source in needs[node] if source not in stop and source not in seen]
        seen.update(more)
        left += more
    return met


# Gradients of weights that several stages use, rewritten so that their parts are summed last.
#
# A weight that is cast or gathered once and used in two stages has a gradient of the form
#
#     g = f(g_0 + g_1)            f: the cast, the layout and the reduction over ranks that its access ends with
#
# and each micro-batch would send g_1 to the stage that applies f. These operators are linear, so that
#
#     g = f(g_0) + f(g_1)
#
# has a part in each stage, which are summed once a step. The values differ from the first form by rounding alone: where
# f casts to a wider type, the sum is taken in that type.

ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
_LINEAR = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.view.default,
    }
)

PartsOf = Callable[[fx.Node], list[fx.Node]]
"""A node to its summands of several stages; to itself alone where it has none."""


def sums_last(step: StepGraph, prefix: str, parts_of: PartsOf) -> StepGraph:
    """The step with the sums of such gradients last; the step itself where there are none.

    `prefix`: how the outputs that are gradients begin.
    """
    found: dict[str, tuple[list[fx.Node], list[fx.Node]]] = {}
    for name, node in step.returned.items():
        chain, total = _linear_end(node)
        parts = parts_of(total) if name.startswith(prefix) and chain else []
        if len(parts) > 1 and all(_alike(part, total) for part in parts):
            found[name] = (parts, chain)
    if not found:
        return step
    copy, known = step.copied()
    for name, (parts, chain) in found.items():
        _rewrite(copy, name, [known[part] for part in parts], [known[one] for one in chain], prefix)
    copy.graph.lint()
    return copy


def _linear_end(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The linear operators of one input that an output ends with, in their order, and what they are applied to."""
    chain: list[fx.Node] = []
    while _is_linear(node) and isinstance(node.meta.get("value"), Value):
        (source,) = node.all_input_nodes
        if len(source.users) > 1 or source.op != "call_function":
            break
        chain.append(node)
        node = source
    return chain[::-1], node


def _is_linear(node: fx.Node) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    return node.target in _LINEAR or is_wait(node) or (is_collective(node) and "sum" in node.args)


def _alike(part: fx.Node, total: fx.Node) -> bool:
    value, whole = part.meta.get("value"), total.meta.get("value")
    if not isinstance(value, Value) or not isinstance(whole, Value):
        return False
    return (value.shape, value.dtype) == (whole.shape, whole.dtype)


def _rewrite(step: StepGraph, name: str, parts: list[fx.Node], chain: list[fx.Node], prefix: str) -> None:
    (total,) = chain[0].all_input_nodes
    ends = [_applied(step, chain, part, total) for part in parts]
    last = chain[-1]
    sum_of = ends[0]
    with step.graph.inserting_before(step.output):
        for end in ends[1:]:
            sum_of = _node(step, ADD, (sum_of, end), last, last.meta["value"], {})
    step.output.replace_input_with(last, sum_of)
    for node in (*ends, sum_of):
        step.gradients[node.meta["value"].storage] = name.removeprefix(prefix)


def _applied(step: StepGraph, chain: list[fx.Node], part: fx.Node, total: fx.Node) -> fx.Node:
    """The chain applied to one part, right behind it."""
    node, after = part, part
    moved: dict[int, int] = {}
    value = total.meta["value"]
    if part.meta["value"].stride != value.stride:
        # The chain was captured for a sum, which is contiguous.
        with step.graph.inserting_after(after):
            node = after = _node(
                step, _CLONE, (part,), total, value, moved, {"memory_format": torch.contiguous_format}
            )
    else:
        moved[value.storage] = part.meta["value"].storage
    for one in chain:
        (source,) = one.all_input_nodes
        exchanged = partial(_exchanged, source, node)
        with step.graph.inserting_after(after):
            node = after = _node(
                step,
                one.target,
                fx.map_arg(one.args, exchanged),
                one,
                one.meta["value"],
                moved,
                fx.map_arg(one.kwargs, exchanged),
            )
    return node


def _exchanged(source: fx.Node, by: fx.Node, node: fx.Node) -> fx.Node:
    return by if node is source else node


def _node(
    step: StepGraph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    value: Value,
    moved: dict[int, int],
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A node with a result like `value`, whose storage is that of `moved`, or a new one that is then known there."""
    result: fx.Node = step.graph.call_function(target, args, kwargs or {})
    if value.storage not in moved:
        old = step.storages[value.storage]
        moved[value.storage] = len(step.storages)
        step.storages.append(Storage(moved[value.storage], old.bytes, old.device))
    # Of no module, so that it belongs to the stage of what it is applied to.
    result.meta = {**like.meta, "module": "", "value": value.in_storage(moved[value.storage])}
    return result
