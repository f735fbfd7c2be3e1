"""Workspaces: memory that a runtime takes during a node and that no tensor shows.

On a CPU, tensors are moved by gloo as `compat.gloo` has it:

    all-gather        a flat buffer as large as the result, which is copied out
    reduce-scatter    what the other ranks sent, as large as what is scattered; in half precision the sum in float32
    coalesced         of tensors that travel in one message, that message too, and a gather's result before it is cut up

They are held until the collective has been waited for. Elsewhere nothing is known to be taken: NCCL's buffers are made
once, with its communicators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat import gloo
from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.ir import StepGraph, Value, values_of
from hyper_parallel.graph.liveness import Lifetime
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.regions import region_of


def workspaces(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> list[Lifetime]:
    """What is taken beside the storages of `lifetimes`, to be laid beside them; `sizes` gives the symbols values.

    Their storage is -1, since they have none.
    """
    nodes = list(step.nodes)
    ends = {begun(node): at for at, node in enumerate(nodes) if is_wait(node)}
    found = []
    for at, node in enumerate(nodes):
        taken = _taken(node, sizes or {})
        if taken:
            where = (node.meta["module"], region_of(node).phase)
            found.append(Lifetime(-1, taken, "temporary", at, ends.get(node, at), None, *where))
    return found


def _taken(node: fx.Node, sizes: Mapping[Any, int]) -> int:
    """Bytes that gloo and its kernels take for a node."""
    if not is_collective(node):
        return 0
    name = str(node.target)
    given = _given(node)
    if "all_gather" in name:
        wholes = list(values_of(node))
    elif "reduce_scatter" in name:
        wholes = given
    else:
        return 0
    if any(value.device.type != _GLOO for value in wholes):
        return 0
    parts, whole = [_bytes(value, sizes) for value in given], [_bytes(value, sizes) for value in wholes]
    taken = sum(whole)
    for bucket in gloo.buckets([(value.dtype, one) for value, one in zip(wholes, whole, strict=True)]):
        if len(bucket) > 1:
            taken += sum(parts[at] for at in bucket)
            taken += sum(whole[at] for at in bucket) if "all_gather" in name else 0
    if "reduce_scatter" in name:
        narrow = [value for value in values_of(node) if value.dtype in gloo.NARROW]
        taken += sum(known(value.elements, sizes) * _SUM for value in narrow)
    return taken


def _given(node: fx.Node) -> list[Value]:
    """The tensors that a collective is given, one after the other."""
    sources: Any = node.args[0]
    nodes = sources if isinstance(sources, list | tuple) else [sources]
    return [value for source in nodes for value in values_of(source)]


def _bytes(value: Value, sizes: Mapping[Any, int]) -> int:
    return value.dtype.itemsize * known(value.elements, sizes)


_SUM = torch.float32.itemsize
"""Of an element, where narrow ones are summed."""
_GLOO = "cpu"
"""Whose tensors gloo moves."""
