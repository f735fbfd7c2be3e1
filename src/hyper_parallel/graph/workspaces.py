"""Memory that the runtime takes for itself while a node runs, which no tensor of the graph shows.

gloo, which moves tensors between processes on a CPU, gathers into a flat buffer as large as the result and copies that
out, and reduces a copy of what it scatters (measured: gathering 16 MiB of two ranks takes 64 MiB in all, of which 32
are the result; scattering 16 MiB takes 24, of which 8 are). It holds them until the collective has been waited for.
Elsewhere nothing is known to be taken: NCCL's buffers are made once, with its communicators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from hyper_parallel.graph.effects import begun
from hyper_parallel.graph.groups import is_collective, is_wait
from hyper_parallel.graph.lifetimes import Lifetime
from hyper_parallel.graph.nouns import StepGraph, Value, values_of
from hyper_parallel.graph.sizes import known


def workspaces(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> list[Lifetime]:
    """What is taken beside the storages of `lifetimes`, to be laid beside them; `sizes` gives the symbols values.

    Their storage is -1, since they have none.
    """
    nodes = list(step.nodes)
    ends = {begun(node): at for at, node in enumerate(nodes) if is_wait(node)}
    found = []
    for at, node in enumerate(nodes):
        taken = sum(value.dtype.itemsize * known(value.elements, sizes or {}) for value in _copied(node))
        if taken:
            where = (node.meta["module"], node.meta["phase"])
            found.append(Lifetime(-1, taken, "temporary", at, ends.get(node, at), None, *where))
    return found


def _copied(node: fx.Node) -> list[Value]:
    """What gloo copies for a node."""
    if not is_collective(node):
        return []
    name = str(node.target)
    values = []
    if "all_gather" in name:
        values = list(values_of(node))
    elif "reduce_scatter" in name:
        values = [value for source in node.all_input_nodes for value in values_of(source)]
    return [value for value in values if value.device.type == _GLOO]


_GLOO = "cpu"
"""Whose tensors gloo moves."""
