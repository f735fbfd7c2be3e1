"""Writes a part of a step's graph as a graph of its own; values that the part does not compute become its inputs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.fx_graph import copy_node
from hyper_parallel.graph.dependencies import Needs, data_sources, needed, sources, stops
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import Input, Kind, StepGraph, Storage, Value, flat_values, values_of
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.step_context import Phase, Region

_STRIDED = torch.ops.aten.as_strided.default


class GraphWriter:
    """The graph as it grows. `made` has what each node of the whole graph became."""

    def __init__(self, whole: StepGraph) -> None:
        self._whole = whole
        self._graph = fx.Graph()
        self._storages = list(whole.storages)
        self._inputs: list[Input] = []
        self.made: dict[fx.Node, fx.Node] = {}

    def inputs(self, used: Collection[fx.Node]) -> None:
        """The whole graph's inputs and constants, those that are used."""
        for entry, node in zip(self._whole.inputs, self._whole.placeholders, strict=True):
            if node in used:
                made = self.made[node] = self._graph.placeholder(node.name)
                made.meta = dict(node.meta)
                self._inputs.append(entry)
        for node in self._whole.graph.nodes:
            if node.op == "get_attr" and node in used:
                made = self.made[node] = self._graph.node_copy(node)
                made.meta = dict(node.meta)

    def given(self, node: fx.Node, name: str, kind: Kind, direction: Phase) -> None:
        """An input in place of a node that gives one tensor."""
        self.made[node] = self.input_like(node, name, kind, direction)

    def input_like(self, node: fx.Node, name: str, kind: Kind, direction: Phase) -> fx.Node:
        """An input like the one tensor that a node gives."""
        (value,) = values_of(node)
        made = self._graph.placeholder(f"given_{node.name}")
        self._inputs.append(Input(name, kind))
        self._arrives(node, made, value, direction, self._storage(span(value), value, name))
        return made

    def answered(self, node: fx.Node, direction: Phase) -> None:
        """A value that the host is asked for, in the order of its memory, in place of a node."""
        (value,) = values_of(node)
        answer = self.host(HostPoint.RECEIVE, [], direction, value)
        made = self._graph.call_function(_STRIDED, (answer, list(value.shape), list(value.stride)))
        (flat,) = values_of(answer)
        self._arrives(node, made, value, direction, flat.storage)
        self.made[node] = made

    def _arrives(self, node: fx.Node, made: fx.Node, value: Value, direction: Phase, storage: int) -> None:
        """`made` gives in this graph what `node` gives elsewhere."""
        made.meta.update(
            _meta(direction), value=replace(value, storage=storage), module=node.meta.get("module", "")
        )

    def emit(self, node: fx.Node, instead: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        """A node of the whole graph. `instead`: nodes of this graph that it uses in place of what its arguments became,
        or what those that were emitted with it became; it is then not what others find in `made`."""
        known = self.made if instead is None else ChainMap(instead, self.made)
        made = copy_node(self._graph, node, lambda source: known[source])
        moved: dict[int, int] = {}
        for source in node.all_input_nodes:
            moved.update(moved_storages(source.meta.get("value"), known[source].meta.get("value")))
        if moved and "value" in node.meta:
            made.meta["value"] = placed(node.meta["value"], moved)
        if moved and "writes" in node.meta:
            made.meta["writes"] = {moved.get(storage, storage) for storage in node.meta["writes"]}
        if instead is None:
            self.made[node] = made
        return made

    def added(self, target: Any, arguments: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A node that is not in the whole graph, with a result like another node's in memory of its own."""
        made = self._graph.call_function(target, arguments)
        (value,) = values_of(like)
        made.meta.update(like.meta, value=replace(value, storage=self._storage(span(value), value)))
        return made

    def host(
        self, point: HostPoint, shown: Sequence[fx.Node], direction: Phase, like: Value | None = None
    ) -> fx.Node:
        """A host point; with `like` it is answered with the elements of such a value, in the order of its memory."""
        # A host point has to show something; the first input is there anyway.
        values = list(shown) or [next(iter(self._graph.nodes))]
        like = like or replace(next(values_of(values[0])), shape=(0,), stride=(1,), dtype=torch.float32)
        count = span(like)
        made = self._graph.call_function(HOST, (point.value, values, count), {"dtype": like.dtype})
        given = Value((count,), (1,), like.dtype, like.device, self._storage(count, like))
        made.meta.update(_meta(direction), value=given)
        return made

    def finished(self, outputs: Mapping[str, fx.Node], direction: Phase) -> StepGraph:
        """The graph, which returns these nodes of it."""
        whole = self._whole
        self._graph.output(tuple(outputs.values())).meta.update(_meta(direction))
        return StepGraph(
            self._graph,
            self._inputs,
            list(outputs),
            self._storages,
            dict(whole.constants),
            dict(whole.gradients),
            {symbol: self.made[node] for symbol, node in whole.sizes.items() if node in self.made},
            dict(whole.even),
            whole.balanced,
            whole.groups,
        )

    def _storage(self, count: int, like: Value, name: str | None = None) -> int:
        """Memory for so many elements, by its index."""
        index = len(self._storages)
        self._storages.append(Storage(index, count * like.dtype.itemsize, like.device, name))
        return index


def _meta(phase: Phase) -> dict[str, Any]:
    """Of a node that is not in the whole graph."""
    return {"region": Region("", 0, phase), "module": "", "recomputed": False}


def span(value: Value) -> int:
    """Elements between the first and the last of a value in memory, both counted."""
    if not value.elements:
        return 0
    steps = zip(value.shape, value.stride, strict=True)
    return 1 + int(sum((size - 1) * stride for size, stride in steps))


def moved_storages(before: Any, after: Any) -> dict[int, int]:
    """Of a node's value that lies elsewhere now, each storage that was another one to the one that it is."""
    pairs = zip(flat_values(before), flat_values(after), strict=True)
    return {old.storage: new.storage for old, new in pairs if old.storage != new.storage}


def placed(value: Any, moved: Mapping[int, int]) -> Any:
    """A value, or a nest of them, with its storages renumbered."""
    if isinstance(value, Value):
        return replace(value, storage=moved.get(value.storage, value.storage))
    if isinstance(value, tuple | list):
        return type(value)(placed(one, moved) for one in value)
    return value


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
