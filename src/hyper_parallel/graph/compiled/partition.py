"""Partition of a step into subgraphs that are compiled together.

A subgraph is a run of neighbours in the order of the step, so replacing it by one node moves nothing past anything.
It ends

- at whatever has an order of its own: a collective, its wait, a host point, an operator that is not PyTorch's;
- at what a compiler would do differently (random numbers) or cannot know (sizes that depend on the data);
- where what runs in each micro-batch meets what runs in one of them (`graph.accumulate`);
- where the next layer begins (`graph.regions`). Layers that are alike give subgraphs that are alike, which are compiled
  once; so compiling takes as long for eighty layers as for two.

Only the forward pass, the loss and the backward pass are cut up; the update's operators are whole kernels already.

No memory goes across a subgraph's boundary under two names: a view that comes from outside is taken again inside, a
view that goes outside is taken again there, and what an in-place operator gives is what it was given.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph.accumulate import When, when_of
from hyper_parallel.graph.collective_groups import is_wait
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.memory_effects import draws_random, is_view, writes
from hyper_parallel.graph.regions import region_of

_PHASES = frozenset({"forward", "loss", "backward"})
_NAMESPACES = frozenset({"aten", "prims"})
FEWEST = 4
"""Nodes that compute, not counting views: below it, a call of a compiled function costs what it saves."""


@dataclass(frozen=True)
class Subgraph:
    """Neighbours that are compiled together."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """What is read from outside, each its own memory, in order of first use. A subgraph may write to it."""
    outputs: tuple[fx.Node, ...]
    """What is used outside, each its own memory."""

    def graph(self) -> fx.Graph:
        """Computes the outputs from the inputs: the subgraph's nodes, in-place ones as they are."""
        graph = fx.Graph()
        made = {node: graph.placeholder(f"input_{at}") for at, node in enumerate(self.inputs)}
        for node, given in made.items():
            given.meta["value"] = node.meta["value"]

        def found(node: fx.Node) -> fx.Node:
            if node not in made:
                node = original(node)
            if node not in made:
                made[node] = again(node, graph, found)
            return made[node]

        for node in self.nodes:
            for source in node.all_input_nodes:
                found(source)
            made[node] = graph.node_copy(node, found)
        graph.output(tuple(made[node] for node in self.outputs))
        return graph


def partition(step: StepGraph) -> list[Subgraph]:
    """All that is worth compiling, in order."""
    found = []
    for place, run in itertools.groupby(step.nodes, _place):
        nodes = tuple(run)
        if place is not None and sum(_computes(node) for node in nodes) >= FEWEST:
            subgraph = _subgraph(nodes)
            if _own_memory(subgraph.inputs) and _own_memory(subgraph.outputs):
                found.append(subgraph)
    return found


def original(node: fx.Node) -> fx.Node:
    """The node that first gave this tensor: an in-place operator gives back what it was given."""
    while node.op == "call_function" and writes(node) and not is_wait(node):
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or changed.meta.get("value") != node.meta.get("value"):
            break
        node = changed
    return node


def takes_a_view(node: fx.Node) -> bool:
    """Whether a node gives what is there another shape, which can be done again anywhere."""
    return node.target is not operator.getitem and is_view(node) and _compilable(node)


def again(node: fx.Node, graph: fx.Graph, source_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A view, taken again of what `source_of` gives for its arguments."""
    for source in node.all_input_nodes:
        source_of(source)  # before the view itself is written down
    made = graph.node_copy(node, source_of)
    made.meta = dict(node.meta)
    return made


def _place(node: fx.Node) -> tuple[str, When] | None:
    """The layer of a node, "" outside of all layers, and when it runs; None for one that cannot be compiled."""
    region = region_of(node)
    return (region.layer, when_of(node)) if region.phase in _PHASES and _compilable(node) else None


def _compilable(node: fx.Node) -> bool:
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _compilable(source)
    return (
        node.op == "call_function"
        and getattr(target, "namespace", "") in _NAMESPACES
        and not draws_random(node)
        and all(_is_fixed(part) for part in (node, *node.all_input_nodes))
    )


def _is_fixed(node: fx.Node) -> bool:
    """Whether a node gives tensors whose sizes are known."""
    values = list(values_of(node))
    return bool(values) and not any(
        isinstance(size, torch.SymInt) for value in values for size in (*value.shape, *value.stride)
    )


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view(node)


def _subgraph(nodes: tuple[fx.Node, ...]) -> Subgraph:
    inside = frozenset(nodes)
    outer = frozenset(source for node in nodes for source in node.all_input_nodes) - inside
    read = (source for node in nodes for source in node.all_input_nodes if source in outer)
    used = (node for node in nodes if any(user not in inside for user in node.users))
    return Subgraph(
        nodes,
        tuple(dict.fromkeys(_roots(read, None))),
        tuple(root for root in dict.fromkeys(_roots(used, inside)) if root in inside),
    )


def _roots(nodes: Iterable[fx.Node], within: Collection[fx.Node] | None) -> Iterator[fx.Node]:
    """What the memory of `nodes` was first given by; the search does not leave `within`."""
    for node in nodes:
        root = original(node)
        if takes_a_view(root) and (within is None or root in within):
            yield from _roots(root.all_input_nodes, within)
        else:
            yield root


def _own_memory(nodes: tuple[fx.Node, ...]) -> bool:
    storages = [value.storage for node in nodes for value in values_of(node)]
    return len(storages) == len(set(storages))
