"""Splits casts of sums into sums of casts, where the summands belong to several pipeline stages.

A weight of two stages has a gradient from each, which autograd adds up before it casts the sum to the dtype of the
parameter:

    g = cast(a + b)    →    g = cast(a) + cast(b)

On the left one stage would have to send a gradient of the weight's size to the other one in each micro-batch; on the
right each stage keeps its own part until the step's end. The right-hand side rounds once less: its sum is in the wider
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from hyper_parallel.graph.graph_writer import GraphWriter
from hyper_parallel.graph.ir import StepGraph, Value
from hyper_parallel.graph.partition import GRADIENT, Labels, summands

_ADD = torch.ops.aten.add.Tensor
_CAST = torch.ops.aten._to_copy.default


def split_sums(step: StepGraph, labels: Labels) -> StepGraph:
    """The step, in which gradients that stages have parts in are sums."""
    found: dict[fx.Node, tuple[Sequence[fx.Node], Sequence[fx.Node]]] = {}
    for name, node in step.returned.items():
        casts = _casts(node)
        if name.startswith(GRADIENT) and casts:
            parts = summands(casts[0].all_input_nodes[0], labels)
            if len(parts) > 1 and all(_alike(part, node) for part in parts):
                found[node] = parts, casts
    return _rewritten(step, found) if found else step


def _casts(node: fx.Node) -> list[fx.Node]:
    """The casts that a value has gone through last, in their order."""
    found: list[fx.Node] = []
    while node.target is _CAST and len(node.args) == 1 and set(node.kwargs) == {"dtype"}:
        found.insert(0, node)
        node = node.all_input_nodes[0]
    return found


def _alike(part: fx.Node, total: fx.Node) -> bool:
    one, other = part.meta["value"], total.meta["value"]
    return isinstance(one, Value) and (one.shape, one.stride) == (other.shape, other.stride)


def _rewritten(
    step: StepGraph, found: Mapping[fx.Node, tuple[Sequence[fx.Node], Sequence[fx.Node]]]
) -> StepGraph:
    writer = GraphWriter(step)
    writer.inputs({*step.placeholders, *step.graph.nodes})
    moved: dict[int, int] = {}
    for node in step.nodes:
        writer.emit(node)
        if node not in found:
            continue
        parts, casts = found[node]
        wide = [_cast(writer, part, casts) for part in parts]
        total = wide[0]
        for one in wide[1:]:
            total = writer.added(_ADD, (total, one), writer.made[node])
        writer.made[node] = total
        moved[node.meta["value"].storage] = total.meta["value"].storage
    made = writer.finished({name: writer.made[node] for name, node in step.returned.items()}, "backward")
    made.gradients = {moved.get(storage, storage): name for storage, name in step.gradients.items()}
    return made


def _cast(writer: GraphWriter, part: fx.Node, casts: Sequence[fx.Node]) -> fx.Node:
    made = writer.made[part]
    for cast in casts:
        made = writer.added(cast.target, (made,), writer.made[cast])
        made.kwargs = cast.kwargs
        made.meta.update({key: part.meta[key] for key in ("region", "module", "recomputed")})
    return made
