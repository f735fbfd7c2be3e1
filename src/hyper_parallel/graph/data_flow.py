"""Data flow of a graph: which nodes have computed what a node uses, in-place writers among them.

Unlike `graph.dependencies` it says nothing of order: nodes that only have to run before another one, such as the
collective before it in its group, are no part of what it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from hyper_parallel.graph.ir import StepGraph, Value, values_of
from hyper_parallel.graph.memory_effects import is_view, touched, writes

Needs = Mapping[fx.Node, Collection[fx.Node]]
"""Each computing node to the ones whose results it uses (`data_sources`)."""


def needed(needs: Needs, wanted: Collection[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The computing nodes that the wanted ones need, without what only those at which to `stop` need."""
    left = [node for node in wanted if node in needs and node not in stop]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(source for source in needs[node] if source not in stop)
    return found


def seen_through(node: fx.Node) -> fx.Node:
    """The node whose result a chain of views shows: others may show it by other views."""
    while is_view(node):
        source = node.all_input_nodes[0]
        if source.op != "call_function" or not isinstance(source.meta.get("value"), Value):
            break
        node = source
    return node


def stops(needs: Needs, given: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The given nodes, and those that only fill their memory before: a gather, for the weight that is a view of it.

    What uses a given node touches that memory too, and so needs those that fill it, by `data_sources`.
    """
    graphs = {node.graph for node in given}
    lasting = {
        value.storage
        for graph in graphs
        for node in graph.nodes
        if node.op == "placeholder"
        for value in values_of(node)
    }
    place = {node: at for at, node in enumerate(needs)}
    last: dict[int, int] = {}
    for node in given:
        for value in values_of(node):
            if value.storage not in lasting and node in place:
                last[value.storage] = max(place[node], last.get(value.storage, 0))
    derived, found = set(given), set(given)
    for node, at in place.items():
        if node in given:
            continue
        storages = {value.storage for value in values_of(node)} | set(writes(node))
        if any(
            source in derived and not storages.isdisjoint(value.storage for value in values_of(source))
            for source in node.all_input_nodes
        ):
            derived.add(node)
            continue
        if storages and all(at <= last.get(storage, -1) for storage in storages):
            found.add(node)
    return frozenset(found)


def sources(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The arguments of these nodes."""
    return {source for node in nodes for source in node.all_input_nodes}


def data_sources(step: StepGraph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Each computing node to the nodes that have computed what it uses: its arguments, and the last write to each
    storage that it touches."""
    wrote: dict[int, fx.Node] = {}
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in step.nodes:
        before = {source for source in node.all_input_nodes if source.op == "call_function"}
        before |= {wrote[storage] for storage in touched(node) if storage in wrote}
        found[node] = frozenset(before - {node})
        wrote.update(dict.fromkeys(writes(node), node))
    return found
