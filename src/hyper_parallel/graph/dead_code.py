"""Dead-code elimination."""

from __future__ import annotations

from typing import Any

from torch import fx

from hyper_parallel.graph.host_update import is_update
from hyper_parallel.graph.ir import StepGraph
from hyper_parallel.graph.memory_effects import draws_random
from hyper_parallel.graph.suspension import HOST
from hyper_parallel.graph.tier_ops import is_cache


def has_effect(node: fx.Node) -> bool:
    """Whether running a node does more than giving its value.

    It writes, talks to other ranks or to the host, moves memory, or draws random numbers, of which the next one gets
    others.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    mutable = schema is not None and schema.is_mutable
    return (
        mutable
        or target is HOST
        or is_cache(node)
        or is_update(node)
        or draws_random(node)
        or getattr(target, "namespace", "") == "_c10d_functional"
    )


def trim(step: StepGraph) -> StepGraph:
    """Take out, in place, the nodes without effect whose value is not used. Returns the same graph."""
    sizes = set(step.sizes.values())
    for node in reversed(list(step.graph.nodes)):
        if not node.users and not has_effect(node):
            step.graph.erase_node(node)
            if node in sizes:
                step.sizes = {symbol: kept for symbol, kept in step.sizes.items() if kept is not node}
    return step
