"""Accumulation: one micro-batch's step as the graphs that a step of several micro-batches runs.

A step of one micro-batch was captured, and its passes have run. Of its nodes these run,

    first     the weights that are gathered once a step, and the micro-batch     returns the weights
    middle    the micro-batch, with those weights
    last      the same, then what runs once a step: reductions, norm, clipping, the update

each in the order of the captured step. Gradients, the loss and counts are added to tensors that the step is given, each
as soon as it is computed; what runs once a step uses the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.data_flow import Needs, data_sources, needed, sources, stops
from hyper_parallel.graph.graph_writer import GraphWriter
from hyper_parallel.graph.ir import StepGraph, Value
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.suspension import HOST

_ADD = torch.ops.aten.add_.Tensor


@dataclass(frozen=True)
class Accumulation:
    """The graphs of a step of two or more micro-batches."""

    first: StepGraph
    middle: StepGraph
    last: StepGraph
    totals: Mapping[str, Value]
    """The tensors that are added to, by the names of the graphs' inputs; zero before a step."""

    @property
    def parts(self) -> tuple[StepGraph, StepGraph, StepGraph]:
        """The graphs, in their order."""
        return self.first, self.middle, self.last


def accumulation(
    step: StepGraph, weights: Mapping[str, fx.Node], sums: Mapping[str, fx.Node], batch: Collection[str]
) -> Accumulation:
    """The graphs of a captured step. `weights`: what is gathered once a step; `sums`: what is added up over its
    micro-batches; by name. `batch`: the names of the inputs that differ from micro-batch to micro-batch.

    Raises GraphError where what runs once a step uses values of a micro-batch that are no sums: it would see those of
    the last one alone.
    """
    cut = _Cut(step, weights, sums)
    cut.check(batch)
    middle = cut.graph(gathers=False, ends=False)
    return Accumulation(
        cut.graph(gathers=True, ends=False) if weights else middle,
        middle,
        cut.graph(gathers=False, ends=True),
        {name: node.meta["value"] for node, name in cut.sums.items()},
    )


class _Cut:
    """What of a step runs when."""

    def __init__(self, step: StepGraph, weights: Mapping[str, fx.Node], sums: Mapping[str, fx.Node]) -> None:
        self._step = step
        self._weights = {name: node for node, name in {node: name for name, node in weights.items()}.items()}
        self.sums = {node: name for name, node in sums.items()}
        needs = data_sources(step)
        lasting = set(step.outside)
        effects = [node for node in step.nodes if writes(node) & lasting or node.target is HOST]
        once = [node for node in effects if region_of(node).phase in ("clip", "optimizer")]
        each = [node for node in effects if region_of(node).phase not in ("clip", "optimizer")]
        self._once = needed(needs, once, stops(needs, self.sums))
        self._behind = _behind(self._once, needs, self.sums)
        """Nodes that run once a step and use sums."""
        given = set(weights.values())
        self._micro = needed(needs, [*each, *self.sums], stops(needs, given))
        self._gathers = needed(needs, list(given))

    def check(self, batch: Collection[str]) -> None:
        """Raise GraphError where what runs once depends on these inputs but through sums."""
        inputs = zip(self._step.inputs, self._step.placeholders, strict=True)
        varies = {node for entry, node in inputs if entry.name in batch}
        for node in self._step.nodes:
            if node in self._once and any(
                one in varies and one not in self.sums for one in node.all_input_nodes
            ):
                varies.add(node)
                if region_of(node).phase in ("clip", "optimizer"):
                    raise GraphError(
                        f"a step of several micro-batches cannot be cut: {node.target}, which runs once a step, "
                        "uses values of one micro-batch that are no gradient, loss or count"
                    )

    def graph(self, *, gathers: bool, ends: bool) -> StepGraph:
        """`gathers`: with what gathers the weights; `ends`: with what runs once a step."""
        nodes = self._micro | (self._gathers if gathers else set()) | (self._once if ends else set())
        writer = GraphWriter(self._step)
        writer.inputs(sources(nodes) | set(self.sums))
        for name, node in self._weights.items() if not gathers else ():
            writer.given(node, name, "parameter", "forward")
        totals = {
            node: writer.input_like(node, name, "gradient", region_of(node).phase)
            for node, name in self.sums.items()
        }
        instead: dict[fx.Node, fx.Node] = {}
        """What nodes became for those that use sums."""
        for node in self._step.nodes:
            if node in nodes and (node in self._micro or node not in self._behind):
                writer.emit(node)
                if node in self.sums:
                    instead[node] = writer.added_in_place(_ADD, totals[node], writer.made[node])
            if ends and node in self._behind:
                instead[node] = writer.emit(node, instead)
        outputs = {name: writer.made[node] for name, node in self._weights.items()} if gathers else {}
        return writer.finished(outputs, "forward")


def _behind(once: Collection[fx.Node], needs: Needs, sums: Collection[fx.Node]) -> set[fx.Node]:
    """Of the nodes that run once a step, those that use sums, in their order."""
    found: set[fx.Node] = set()
    for node in needs:
        if node in once and any(source in sums or source in found for source in needs[node]):
            found.add(node)
    return found
