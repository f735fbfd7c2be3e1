"""Builds the StepGraph of one pipeline stage from the labelled graph of a micro-batch.

A stage runs as a generator (`graph.execute`): it stops after its forward pass, asks for the gradients that come back,
stops when those that go back are computed, and computes the gradients of its weights last. A value that crosses keeps
its shape and strides on the other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.dependencies import dependencies, needed
from hyper_parallel.graph.gradients import GRADIENT, sums_last
from hyper_parallel.graph.graph_writer import GraphWriter
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.partition import (
    Crossing,
    Labels,
    StageOf,
    contributions,
    crossings,
    label,
    summands,
)
from hyper_parallel.graph.step_context import region_of

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class Stage:
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


def partition(step: StepGraph, stage_of: StageOf, stages: int, *, kind: int | None = None) -> Partition:
    """The stages of a micro-batch's graph, whose outputs are the loss and ``gradient.<parameter>``. `kind`: as of
    `crossings`.

    Raises GraphError where the data flow allows no such stages, or a stage would have nothing to do.
    """
    labels = label(step, stage_of, stages)
    apart = sums_last(step, GRADIENT, partial(summands, labels=labels))
    if apart is not step:
        step, labels = apart, label(apart, stage_of, stages)
    outputs = contributions(step, labels)
    nodes = _used_nodes(step, outputs)
    crossing = crossings(step, labels, set(nodes), kind=kind)
    made = tuple(_Builder(step, labels, nodes, crossing, outputs, number).stage() for number in range(stages))
    parts = {
        name: tuple(sorted({labels.stage.get(node, 0) for node in nodes})) for name, nodes in outputs.items()
    }
    return Partition(made, {name: found for name, found in parts.items() if len(found) > 1})


def _used_nodes(step: StepGraph, outputs: Mapping[str, Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes that the outputs need, in order: sums that were taken apart are not."""
    lasting = {storage.index for storage in step.storages if storage.name is not None}
    wanted = [node for nodes in outputs.values() for node in nodes]
    wanted += [node for node in step.nodes if writes(node) & lasting]
    found = needed(dependencies(step), wanted)
    return [node for node in step.nodes if node in found]


class _Builder:
    """Writes the graph of one stage."""

    def __init__(
        self,
        step: StepGraph,
        labels: Labels,
        used: Sequence[fx.Node],
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
        mine = [node for node in used if labels.stage.get(node) == number]
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
        self._writer = GraphWriter(step)
        self._new = self._writer.made
        self._copies: dict[str, fx.Node] = {}
        """Crossing to the copy that is sent, where the stage goes on to change the value."""

    def _with_repeated(self, mine: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Forward and backward nodes in order, with the repeated ones that they need."""
        given = [node for nodes in self._outputs.values() for node in nodes if node in self._labels.repeated]
        left = [*mine, *given]
        wanted: set[fx.Node] = set(left)
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
        forward, inputs, weights = self._order
        writer = self._writer
        used = {source for node in (*self._forward, *self._backward) for source in node.all_input_nodes}
        writer.add_used_inputs(used | {node for parts in self._outputs.values() for node in parts})
        for one in self._receives:
            writer.given(self._by_name[one.node], one.name, "input", "forward")
        for node in forward:
            self._emit(node)
        writer.host_point(HostPoint.FORWARD, self._shown(self._sends), "forward")
        for one in self._back_in:
            writer.answered(self._by_name[one.node], "backward")
        for node in inputs:
            self._emit(node)
        writer.host_point(HostPoint.INPUT, self._shown(self._back_out), "backward")
        for node in weights:
            self._emit(node)
        step = writer.result({name: self._sum(nodes) for name, nodes in self._outputs.items()}, "backward")
        return Stage(self._number, step, self._receives, self._sends, self._back_in, self._back_out)

    def _shown(self, sent: Sequence[Crossing]) -> list[fx.Node]:
        return [self._copies.get(one.name) or self._new[self._by_name[one.node]] for one in sent]

    def _sum(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The sum of the parts that a gradient has in this stage."""
        total = self._new[nodes[0]]
        for node in nodes[1:]:
            total = self._writer.added(_ADD, (total, self._new[node]), total)
        return total

    def _emit(self, node: fx.Node) -> None:
        self._writer.emit(node)
        self._left.subtract(writes(node))
        for one in self._sent.get(node.name, ()):
            # What is sent leaves later, and a stage of the same rank uses this very memory.
            if self._left[one.value.storage] > 0:
                value = self._new[self._by_name[one.node]]
                self._copies[one.name] = self._writer.added(_CLONE, (value,), value)

    def _input_gradients(self) -> set[fx.Node]:
        """The backward nodes that must run before what goes back can be sent."""
        mine = set(self._backward)
        sent = [self._by_name[name] for one in self._back_out for name in (one.node, one.written_by)]
        return needed({node: mine.intersection(self._needs[node]) for node in mine}, sent)
