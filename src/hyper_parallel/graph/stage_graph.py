"""Builds the StepGraph of one pipeline stage from the labelled graph of a micro-batch.

A stage runs as a generator (`graph.execute`): it stops after its forward pass, asks for the gradients that come back,
stops when those that go back are computed, and computes the gradients of its weights last. A value that crosses keeps
its shape and strides on the other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.ir import Input, StepGraph, Storage, Value, values_of
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.partition import (
    GRADIENT,
    Crossing,
    Labels,
    StageOf,
    contributions,
    crossings,
    label,
    summands,
)
from hyper_parallel.graph.phase import Phase
from hyper_parallel.graph.regions import Region, region_of
from hyper_parallel.graph.shared_gradients import sums_last
from hyper_parallel.graph.suspension import HOST, HostPoint

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
_STRIDED = torch.ops.aten.as_strided.default


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline."""

    number: int
    step: StepGraph
    receives: tuple[Crossing, ...]
    """What comes from earlier stages: inputs of the graph by the crossing's name."""
    sends: tuple[Crossing, ...]
    """What goes to later stages: shown at the host point ``forward``, in this order."""
    gradients_in: tuple[Crossing, ...]
    """What comes back: asked for at host points ``receive``, in this order."""
    gradients_out: tuple[Crossing, ...]
    """What goes back: shown at the host point ``input``, in this order."""


@dataclass(frozen=True)
class Partition:
    """A micro-batch cut into stages."""

    stages: tuple[Stage, ...]
    shared: Mapping[str, tuple[int, ...]]
    """Outputs that several stages have a part in, and these stages: their sum is the output."""


def partition(step: StepGraph, stage_of: StageOf, stages: int) -> Partition:
    """The stages of a micro-batch's graph, whose outputs are the loss and ``gradient.<parameter>``.

    Raises GraphError where the data flow allows no such stages, or a stage would have nothing to do.
    """
    labels = label(step, stage_of, stages)
    apart = sums_last(step, GRADIENT, partial(summands, labels=labels))
    if apart is not step:
        step, labels = apart, label(apart, stage_of, stages)
    outputs = contributions(step, labels)
    needed = _needed(step, outputs)
    crossing = crossings(step, labels, set(needed))
    made = tuple(
        _Builder(step, labels, needed, crossing, outputs, number).stage() for number in range(stages)
    )
    parts = {
        name: tuple(sorted({labels.stage.get(node, 0) for node in nodes})) for name, nodes in outputs.items()
    }
    return Partition(made, {name: found for name, found in parts.items() if len(found) > 1})


def _needed(step: StepGraph, outputs: Mapping[str, Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes that the outputs need, in order: sums that were taken apart are not."""
    needs = dependencies(step)
    left = [node for nodes in outputs.values() for node in nodes if node.op == "call_function"]
    lasting = {storage.index for storage in step.storages if storage.name is not None}
    left += [node for node in step.nodes if writes(node) & lasting]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(needs[node])
    return [node for node in step.nodes if node in found]


class _Builder:
    """Writes the graph of one stage."""

    def __init__(
        self,
        step: StepGraph,
        labels: Labels,
        needed: Sequence[fx.Node],
        crossing: Sequence[Crossing],
        outputs: Mapping[str, Sequence[fx.Node]],
        number: int,
    ) -> None:
        self._whole, self._labels, self._number = step, labels, number
        self._by_name = {node.name: node for node in step.graph.nodes}
        self._needs = dependencies(step)
        self._receives = tuple(one for one in crossing if one.target == number and one.direction == "forward")
        self._sends = tuple(one for one in crossing if one.source == number and one.direction == "forward")
        self._back_in = tuple(one for one in crossing if one.target == number and one.direction == "backward")
        self._back_out = tuple(
            one for one in crossing if one.source == number and one.direction == "backward"
        )
        mine_of = {
            name: [node for node in nodes if labels.stage.get(node, 0) == number]
            for name, nodes in outputs.items()
        }
        self._outputs = {name: nodes for name, nodes in mine_of.items() if nodes}
        """Each output to its parts in this stage."""
        mine = [node for node in needed if labels.stage.get(node) == number]
        self._forward, self._backward = self._with_repeated(mine)
        if not mine:
            raise GraphError(f"stage {number} of the pipeline has nothing to compute; use fewer stages")
        early = self._input_gradients()
        self._order = (
            self._forward,
            [node for node in self._backward if node in early],
            [node for node in self._backward if node not in early],
        )
        """Forward nodes, gradients of inputs, gradients of weights."""
        self._sent: dict[str, list[Crossing]] = {}
        for one in (*self._sends, *self._back_out):
            self._sent.setdefault(one.written_by, []).append(one)
        self._left = Counter(storage for nodes in self._order for node in nodes for storage in writes(node))
        """Storage to the writes to it that are still to come."""
        self._graph = fx.Graph()
        self._storages = list(step.storages)
        self._inputs: list[Input] = []
        self._new: dict[fx.Node, fx.Node] = {}
        self._copies: dict[str, fx.Node] = {}
        """Crossing to the copy that is sent, where the stage goes on to change the value."""
        self._moved: dict[fx.Node, dict[int, int]] = {}
        """Node to where its values lie in this stage, of storages that another stage has made."""

    def _with_repeated(self, mine: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Forward and backward nodes in order, with the repeated ones that they need."""
        wanted: set[fx.Node] = set(mine)
        left = list(mine)
        writers: dict[int, list[fx.Node]] = {}
        for node in self._labels.repeated:
            for storage in writes(node):
                writers.setdefault(storage, []).append(node)
        while left:
            node = left.pop()
            known = [source for source in self._labels.sources[node] if source in self._labels.repeated]
            if node in self._labels.repeated:
                known += [other for value in values_of(node) for other in writers.get(value.storage, ())]
            for source in known:
                if source not in wanted:
                    wanted.add(source)
                    left.append(source)
        nodes = [node for node in self._whole.nodes if node in wanted]
        return (
            [node for node in nodes if region_of(node).phase != "backward"],
            [node for node in nodes if region_of(node).phase == "backward"],
        )

    def stage(self) -> Stage:
        """The stage."""
        forward, inputs, weights = self._order
        self._placeholders()
        for node in forward:
            self._emit(node)
        self._host(HostPoint.FORWARD, self._shown(self._sends), "forward")
        for one in self._back_in:
            self._receive(one)
        for node in inputs:
            self._emit(node)
        self._host(HostPoint.INPUT, self._shown(self._back_out), "backward")
        for node in weights:
            self._emit(node)
        output = self._graph.output(tuple(self._sum(nodes) for nodes in self._outputs.values()))
        output.meta.update(self._meta("backward"))
        return Stage(self._number, self._made(), self._receives, self._sends, self._back_in, self._back_out)

    def _shown(self, sent: Sequence[Crossing]) -> list[fx.Node]:
        return [self._copies.get(one.name) or self._new[self._by_name[one.node]] for one in sent]

    def _sum(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The sum of the parts that a gradient has in this stage."""
        total = self._new[nodes[0]]
        for node in nodes[1:]:
            total = self._added(_ADD, (total, self._new[node]), total)
        return total

    def _added(self, target: Any, arguments: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A node that is not in the whole graph, with a result like another node's in memory of its own."""
        made = self._graph.call_function(target, arguments)
        (value,) = values_of(like)
        made.meta.update(like.meta, value=replace(value, storage=self._storage(span(value), value)))
        return made

    def _made(self) -> StepGraph:
        whole = self._whole
        return StepGraph(
            self._graph,
            self._inputs,
            list(self._outputs),
            self._storages,
            dict(whole.constants),
            dict(whole.gradients),
            {symbol: self._new[node] for symbol, node in whole.sizes.items() if node in self._new},
            dict(whole.even),
            whole.balanced,
            whole.groups,
        )

    @staticmethod
    def _meta(phase: Phase) -> dict[str, Any]:
        """Of a node that is not in the whole graph."""
        return {"region": Region("", 0, phase), "module": "", "recomputed": False}

    def _placeholders(self) -> None:
        nodes = {*self._forward, *self._backward}
        used = {source for node in nodes for source in node.all_input_nodes}
        used |= {node for parts in self._outputs.values() for node in parts}
        for entry, node in zip(self._whole.inputs, self._whole.placeholders, strict=True):
            if node in used:
                made = self._new[node] = self._graph.placeholder(node.name)
                made.meta = dict(node.meta)
                self._inputs.append(entry)
        for one in self._receives:
            node = self._by_name[one.node]
            made = self._new[node] = self._graph.placeholder(f"port_{one.node}")
            storage = self._storage(span(one.value), one.value, one.name)
            self._inputs.append(Input(one.name, "input"))
            self._arrives(node, made, one, storage)
        for node in self._whole.graph.nodes:
            if node.op == "get_attr" and node in used:
                made = self._new[node] = self._graph.node_copy(node)
                made.meta = dict(node.meta)

    def _storage(self, count: int, like: Value, name: str | None = None) -> int:
        """Memory for so many elements, by its index."""
        index = len(self._storages)
        self._storages.append(Storage(index, count * like.dtype.itemsize, like.device, name))
        return index

    def _arrives(self, node: fx.Node, made: fx.Node, one: Crossing, storage: int) -> None:
        """`made` gives in this stage what `node` gives in another one."""
        made.meta.update(
            self._meta(one.direction),
            value=replace(one.value, storage=storage),
            module=node.meta["module"],
        )
        self._moved[node] = {one.value.storage: storage}

    def _emit(self, node: fx.Node) -> None:
        made = self._graph.node_copy(node, lambda source: self._new[source])
        made.meta = dict(node.meta)
        moved: dict[int, int] = {}
        for source in node.all_input_nodes:
            moved.update(self._moved.get(source, {}))
        if moved and "value" in node.meta:
            made.meta["value"] = _placed(node.meta["value"], moved)
            if made.meta["value"] != node.meta["value"]:
                self._moved[node] = moved
        if moved and "writes" in node.meta:
            made.meta["writes"] = {moved.get(storage, storage) for storage in node.meta["writes"]}
        self._new[node] = made
        self._left.subtract(writes(node))
        for one in self._sent.get(node.name, ()):
            # What is sent leaves later, and a stage of the same rank uses this very memory.
            if self._left[one.value.storage] > 0:
                value = self._new[self._by_name[one.node]]
                self._copies[one.name] = self._added(_CLONE, (value,), value)

    def _host(
        self, point: HostPoint, shown: Sequence[fx.Node], direction: Phase, like: Value | None = None
    ) -> fx.Node:
        """A host point; with `like` it is answered with the elements of such a value, in the order of its memory."""
        # A host point has to show something; the first input is there anyway.
        values = list(shown) or [next(iter(self._graph.nodes))]
        like = like or replace(next(values_of(values[0])), shape=(0,), stride=(1,), dtype=torch.float32)
        count = span(like)
        made = self._graph.call_function(HOST, (point.value, values, count), {"dtype": like.dtype})
        given = Value((count,), (1,), like.dtype, like.device, self._storage(count, like))
        made.meta.update(self._meta(direction), value=given)
        return made

    def _receive(self, one: Crossing) -> None:
        answer = self._host(HostPoint.RECEIVE, [], "backward", one.value)
        node = self._by_name[one.node]
        made = self._graph.call_function(_STRIDED, (answer, list(one.value.shape), list(one.value.stride)))
        (given,) = values_of(answer)
        self._arrives(node, made, one, given.storage)
        self._new[node] = made

    def _input_gradients(self) -> set[fx.Node]:
        """The backward nodes that must run before what goes back can be sent."""
        mine = set(self._backward)
        left = [self._by_name[name] for one in self._back_out for name in (one.node, one.written_by)]
        found: set[fx.Node] = set()
        while left:
            node = left.pop()
            if node in mine and node not in found:
                found.add(node)
                left.extend(self._needs[node])
        return found


def span(value: Value) -> int:
    """Elements between the first and the last of a value in memory, both counted."""
    if not value.elements:
        return 0
    steps = zip(value.shape, value.stride, strict=True)
    return 1 + int(sum((size - 1) * stride for size, stride in steps))


def _placed(value: Any, moved: Mapping[int, int]) -> Any:
    """A value, or a nest of them, with its storages renumbered."""
    if isinstance(value, Value):
        return replace(value, storage=moved.get(value.storage, value.storage))
    if isinstance(value, tuple | list):
        return type(value)(_placed(one, moved) for one in value)
    return value
