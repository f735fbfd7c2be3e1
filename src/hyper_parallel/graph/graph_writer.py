"""Writers of graphs: one that grows from copies of others, and one of a part of a graph (`subgraph`).

Values that a part does not compute become its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.fx_graph import append_call, copy_node
from hyper_parallel.graph.dependencies import Needs, data_sources, needed, sources, stops
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import (
    CollectiveGroup,
    Even,
    Input,
    Kind,
    Size,
    StepGraph,
    Storage,
    Value,
    flat_values,
    moved_value,
    values_of,
)
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.step_context import Phase, Region

_STRIDED = torch.ops.aten.as_strided.default
_EMPTY, _COPY = torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default


class GrowingGraph:
    """A graph as it grows, mostly from nodes of others."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.storages: list[Storage] = []
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.gradients: dict[int, str] = {}
        self.sizes: dict[Any, fx.Node] = {}
        self.even: dict[Any, Even] = {}
        self.parts = 0
        """Parts of `even` so far."""
        self.named: dict[str, fx.Node] = {}
        """Inputs and what else several copies use, by name."""
        self.groups: dict[str, CollectiveGroup] = {}
        self._regions: dict[tuple[Region, int], Region] = {}
        self._last_input: fx.Node | None = None

    def add_input(self, entry: Input, node: fx.Node, value: Any) -> fx.Node:
        """An input, like a node of another graph but for its value; behind the inputs so far."""
        where = (
            contextlib.nullcontext()
            if self._last_input is None
            else self.graph.inserting_after(self._last_input)
        )
        with where:
            placeholder = self._last_input = self.graph.placeholder(node.name)
        placeholder.meta = {**node.meta, "value": value}
        self.inputs.append(entry)
        self.named[entry.name] = placeholder
        return placeholder

    def storage(self, size: Size, device: torch.device, name: str | None = None) -> int:
        """Add a storage of this number of bytes; its index."""
        index = len(self.storages)
        self.storages.append(Storage(index, size, device, name))
        return index

    def region(self, region: Region, by: int) -> Region:
        """The same region in a later micro-batch."""
        if not by or region.micro_batch is None:
            return region
        known = self._regions.get((region, by))
        if known is None:
            known = self._regions[region, by] = Region(region.layer, by + region.micro_batch, region.phase)
        return known

    def empty(self, value: Value, meta: dict[str, Any], name: str = "empty") -> fx.Node:
        """Memory for a value of known sizes. `meta`: of the node, but for its value."""
        index = self.storage(span(value) * value.dtype.itemsize, value.device)
        arguments = list(value.shape), list(value.stride)
        call = append_call(
            self.graph, name, _EMPTY, arguments, {"dtype": value.dtype, "device": value.device}
        )
        call.meta = {**meta, "value": value.in_storage(index)}
        return call

    def own_copy(self, source: fx.Node, value: Value, meta: dict[str, Any]) -> fx.Node:
        """A copy of a node's value, [as `value`], in its own memory."""
        made = self.empty(value, meta, source.name)
        copy = append_call(self.graph, source.name, _COPY, (made, source), {})
        copy.meta = dict(made.meta)
        return copy

    def host(
        self,
        point: HostPoint,
        shown: Sequence[fx.Node],
        region: Region,
        answer: Value,
        writes: Collection[int] = (),
    ) -> fx.Node:
        """A host point that is answered with a flat tensor like `answer`, in its own memory. `writes`: storages that
        the host writes to."""
        index = self.storage(answer.bytes, answer.device)
        arguments = (point.value, list(shown), answer.elements)
        call = append_call(self.graph, f"host_{point.value}", HOST, arguments, {"dtype": answer.dtype})
        call.meta = {**_meta(region), "value": answer.in_storage(index)}
        if writes:
            call.meta["writes"] = set(writes)
        return call

    def call(self, target: Any, arguments: tuple[Any, ...], region: Region, value: Value) -> fx.Node:
        """A node that is in none of the graphs, with a value that lies in memory of the whole."""
        call = append_call(self.graph, target.__name__.partition(".")[0], target, arguments, {})
        call.meta = {**_meta(region), "value": value}
        return call

    def finished(self, like: StepGraph, outputs: Mapping[str, fx.Node] = MappingProxyType({})) -> StepGraph:
        """The graph. `like`: one of those that it has copies of."""
        self.graph.output(tuple(outputs.values())).meta.update(like.output.meta)
        return StepGraph(
            self.graph,
            self.inputs,
            list(outputs),
            self.storages,
            self.constants,
            self.gradients,
            self.sizes,
            self.even,
            like.balanced,
            {**like.groups, **self.groups},
        )


def _meta(region: Region) -> dict[str, Any]:
    """`meta` of a node that is no copy."""
    return {"region": region, "module": "", "recomputed": False}


class GraphWriter(GrowingGraph):
    """The graph of a part of another one, whose storages keep their numbers."""

    def __init__(self, whole: StepGraph) -> None:
        super().__init__()
        self._whole = whole
        self.storages += whole.storages
        self.constants |= whole.constants
        self.gradients |= whole.gradients
        self.even |= whole.even
        self.made: dict[fx.Node, fx.Node] = {}
        """What each node of the whole graph became."""

    def add_used_inputs(self, used: Collection[fx.Node]) -> None:
        """The whole graph's inputs and constants, those that are used."""
        for entry, node in zip(self._whole.inputs, self._whole.placeholders, strict=True):
            if node in used:
                self.made[node] = self.add_input(entry, node, node.meta["value"])
        for node in self._whole.graph.nodes:
            if node.op == "get_attr" and node in used:
                self.add_constant(node)

    def add_constant(self, node: fx.Node) -> None:
        """One of the whole graph's constants."""
        copy = self.made[node] = self.graph.node_copy(node)
        copy.meta = dict(node.meta)

    def given(self, node: fx.Node, name: str, kind: Kind, direction: Phase) -> None:
        """An input in place of a node that gives one tensor."""
        (value,) = values_of(node)
        placeholder = self.graph.placeholder(f"given_{node.name}")
        self.inputs.append(Input(name, kind))
        self._arrives(node, placeholder, value, direction, self._span_of(value, name))

    def answered(self, node: fx.Node, direction: Phase) -> None:
        """A value that the host is asked for, in the order of its memory, in place of a node."""
        (value,) = values_of(node)
        answer = self.host_point(HostPoint.RECEIVE, [], direction, value)
        view = self.graph.call_function(_STRIDED, (answer, list(value.shape), list(value.stride)))
        (flat,) = values_of(answer)
        self._arrives(node, view, value, direction, flat.storage)

    def _arrives(self, node: fx.Node, copy: fx.Node, value: Value, direction: Phase, storage: int) -> None:
        """`copy` gives in this graph what `node` gives elsewhere."""
        copy.meta.update(_meta(_region(direction)), module=node.meta.get("module", ""))
        copy.meta["value"] = value.in_storage(storage)
        self.made[node] = copy

    def emit(self, node: fx.Node) -> fx.Node:
        """A node of the whole graph."""
        copy = self.made[node] = copy_node(self.graph, node, self.made.__getitem__)
        moved: dict[int, int] = {}
        for source in node.all_input_nodes:
            moved.update(moved_storages(source.meta.get("value"), self.made[source].meta.get("value")))
        copy.meta = moved_meta(copy, moved)
        return copy

    def added(self, target: Any, arguments: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A node that is not in the whole graph, with a result like another node's in its own memory."""
        call = self.graph.call_function(target, arguments)
        (value,) = values_of(like)
        call.meta.update(like.meta, value=value.in_storage(self._span_of(value)))
        return call

    def host_point(
        self, point: HostPoint, shown: Sequence[fx.Node], direction: Phase, like: Value | None = None
    ) -> fx.Node:
        """A host point; with `like` it is answered with the elements of such a value, in the order of its memory."""
        # A host point has to show something; the first input is there anyway.
        values = list(shown) or [next(iter(self.graph.nodes))]
        like = like or replace(next(values_of(values[0])), shape=(0,), stride=(1,), dtype=torch.float32)
        return self.host(point, values, _region(direction), replace(like, shape=(span(like),), stride=(1,)))

    def result(self, outputs: Mapping[str, fx.Node], direction: Phase) -> StepGraph:
        """The graph, which returns these nodes of it."""
        sizes = self._whole.sizes.items()
        self.sizes = {symbol: self.made[node] for symbol, node in sizes if node in self.made}
        finished = self.finished(self._whole, outputs)
        finished.output.meta = _meta(_region(direction))
        return finished

    def _span_of(self, value: Value, name: str | None = None) -> int:
        """Memory for a value, by its index."""
        return self.storage(span(value) * value.dtype.itemsize, value.device, name)


def _region(phase: Phase) -> Region:
    return Region("", 0, phase)


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


def moved_meta(node: fx.Node, storages: Mapping[int, int]) -> dict[str, Any]:
    """A node's meta with some storages replaced by others."""
    meta = dict(node.meta)
    if storages and "value" in meta:
        meta["value"] = moved_value(meta["value"], storages)
    if storages and "writes" in meta:
        meta["writes"] = {storages.get(storage, storage) for storage in meta["writes"]}
    return meta


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
    writer.add_used_inputs(used)
    for node, name in given.items():
        if node in used:
            writer.given(node, name, kind, direction)
    for node in step.nodes:
        if node in nodes:
            writer.emit(node)
    return writer.result({name: writer.made[node] for name, node in wanted.items()}, direction)
