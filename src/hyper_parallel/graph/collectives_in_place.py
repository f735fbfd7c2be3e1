"""Gathers of weights moved to their first use, and reductions of gradients to where these are complete.

A model whose weights are all gathered when it is called (`shard.gathered_at_root`) has all gathers first in its graph
and all reductions last, so that every weight would be there for the whole step. Moved, each belongs to the module that
uses the weight first, as it does where modules gather their own.
"""

from __future__ import annotations

from torch import fx

from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.dependencies import dependencies, later, reorder
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import draws_random, writes
from hyper_parallel.graph.regions import region_of


def collectives_in_place(step: StepGraph) -> StepGraph:
    """The same step in another order, which ranks share that compute with the same weights."""
    gathers = _gathers(step)
    made = reorder(step, later(step, gathers), [node for node in step.nodes if is_collective(node)])
    moved = {node.name for node in gathers}
    place = {node: at for at, node in enumerate(made.nodes)}
    for node in reversed(list(made.nodes)):
        users = [user for user in node.users if user.op == "call_function"]
        if node.name in moved and users:
            node.meta["module"] = min(users, key=lambda user: place[user]).meta["module"]
        elif node.name in moved and not node.users:
            made.graph.erase_node(node)  # of a weight that nothing uses
    return _reduced_at_once(made, list(made.nodes))


def _gathers(step: StepGraph) -> list[fx.Node]:
    """What makes weights whole, of parameters alone and before the model's code."""
    nodes = [node for node in step.nodes if node.meta["module"] == ""]
    known = of_weights(step, list(step.nodes)) | set(step.outside)
    return [
        node for node in nodes if _pure(node) and all(value.storage in known for value in values_of(node))
    ]


def _reduced_at_once(step: StepGraph, nodes: list[fx.Node]) -> StepGraph:
    """What reduces gradients in the backward pass of the root, as early as it can be."""
    root = [
        node
        for node in nodes
        if node.meta["module"] == "" and region_of(node).phase == "backward" and _pure(node)
    ]
    found = {node for node in root if is_collective(node)}
    for node in reversed(root):
        if any(user in found for user in node.users):
            found.add(node)
    for node in root:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    free = [node for node in nodes if is_collective(node)]
    needs = dependencies(step, free)
    places: dict[fx.Node, tuple[int, ...]] = {}
    for at, node in enumerate(nodes):
        after = max((places[other] for other in needs[node]), default=(-1,))
        places[node] = (*after, at) if node in found else (at,)
    return reorder(step, sorted(nodes, key=lambda node: places[node]), free, needs)


def _pure(node: fx.Node) -> bool:
    return is_wait(node) or not (writes(node) or draws_random(node))
