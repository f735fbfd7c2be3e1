"""A part of a graph as a graph of its own: what some of its nodes need, down to values that are given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hyper_parallel.graph.data_flow import Needs, data_sources, needed, sources, stops
from hyper_parallel.graph.graph_writer import GraphWriter
from hyper_parallel.graph.ir import Kind, StepGraph
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.phase import Phase


def subgraph(
    step: StepGraph,
    wanted: Mapping[str, fx.Node],
    given: Mapping[fx.Node, str],
    kind: Kind,
    direction: Phase,
    *,
    effects: bool = False,
    needs: Needs | None = None,
) -> StepGraph:
    """The graph that computes `wanted`, by the names of its outputs, from inputs of the whole graph and from values of
    the `given` nodes, which are inputs of this kind by these names.

    Each given node gives one tensor in memory that nothing else in the part writes to. `effects`: it also does what the
    whole graph does to memory from outside, such as buffers. `needs`: the graph's data flow where it is known.
    """
    lasting = set(step.outside)
    also = [node for node in step.nodes if writes(node) & lasting] if effects else []
    needs = data_sources(step) if needs is None else needs
    nodes = needed(needs, [*wanted.values(), *also], stops(needs, given))
    used = sources(nodes) | set(wanted.values())
    writer = GraphWriter(step)
    writer.inputs(used)
    for node, name in given.items():
        if node in used:
            writer.given(node, name, kind, direction)
    for node in step.nodes:
        if node in nodes:
            writer.emit(node)
    return writer.finished({name: writer.made[node] for name, node in wanted.items()}, direction)
