"""Layer window: a few layers as a step of their own, for fast trials.

What comes from elsewhere comes from outside, and is there. The layers are taken from the middle, where a step has most
of them and each is like the next one. The two passes are looked at one by one: nothing would hold them apart.
"""

from __future__ import annotations

from torch import fx

from hyper_parallel.graph import Input, StepGraph, values_of
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.phase import Phase
from hyper_parallel.graph.regions import region_of


def excerpt(step: StepGraph, layers: int, phase: Phase) -> StepGraph:
    """One pass through so many layers of a step; through all where it has no more."""
    nodes = list(step.nodes)
    order: dict[str, None] = {}
    for node in nodes:
        if region_of(node).phase == "forward" and region_of(node).layer:
            order.setdefault(region_of(node).layer)
    names = list(order)
    first = max(0, (len(names) - layers + 1) // 2)
    chosen = set(names[first : first + layers])
    weights = of_weights(step, nodes)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    inputs: list[Input] = []
    kinds = {node: entry.kind for entry, node in zip(step.inputs, step.placeholders, strict=True)}
    kept = [node for node in nodes if region_of(node).layer in chosen and region_of(node).phase == phase]
    inside = set(kept)
    for node in kept:
        for source in node.all_input_nodes:
            if source in inside or source in new:
                continue
            if source.op == "get_attr":
                new[source] = graph.get_attr(str(source.target))
            else:
                new[source] = graph.placeholder(source.name)
                lasting = kinds.get(source) == "parameter" or any(
                    value.storage in weights for value in values_of(source)
                )
                inputs.append(Input(source.name, "parameter" if lasting else "input"))
            new[source].meta = dict(source.meta)
    for node in kept:
        new[node] = graph.node_copy(node, lambda source: new[source])
        new[node].meta = dict(node.meta)
    graph.output(())
    sizes = {symbol: new[node] for symbol, node in step.sizes.items() if node in new}
    return StepGraph(
        graph,
        inputs,
        [],
        list(step.storages),
        dict(step.constants),
        {},
        sizes,
        dict(step.even),
        step.balanced,
        step.groups,
    )
