"""Graph IR: StepGraph, the values on its edges, the storages that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from hyper_parallel.compat.graph_nodes import append_copy
from hyper_parallel.graph.tier_ops import Slot

Size = Any
"""A number of elements or bytes: an int, or a torch.SymInt of sizes that only a run knows."""

Kind = Literal["parameter", "buffer", "optimizer", "gradient", "input", "constant", "activation", "temporary"]
"""What a storage holds. `gradient`: of a parameter, until the update. `activation`: made before the backward pass and
used in it. `temporary`: everything else."""


@dataclass(frozen=True)
class Value:
    """What one edge of the graph carries."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    """Index into `StepGraph.storages`. Views share one."""

    @property
    def elements(self) -> Size:
        """How many there are."""
        count = 1
        for size in self.shape:
            count = count * size
        return count

    @property
    def bytes(self) -> Size:
        """Of the elements, each counted once even where an expanded dim repeats it."""
        count: Size = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            if not (isinstance(stride, int) and stride == 0):
                count = count * size
        return count


@dataclass(frozen=True)
class Storage:
    """Memory that one or several values lie in."""

    index: int
    bytes: Size
    device: torch.device
    name: str | None = None
    """Of the input that brings it; None for what the step makes itself."""


@dataclass(frozen=True)
class Input:
    """A tensor that the step reads from outside; state is also written to, in place."""

    name: str
    kind: Kind


class GivenTensor(NamedTuple):
    """A tensor that a step reads from outside, for its capture."""

    kind: Kind
    tensor: torch.Tensor


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that a collective joins."""

    name: str
    """Of the process group, as the graph's nodes have it."""
    axis: str
    """Of the mesh: an axis, a joint such as ``shard*context``, or a fold such as ``expert``."""
    ranks: tuple[int, ...]
    """Global ranks in the group's order."""


@dataclass(frozen=True)
class Even:
    """What a size that depends on the data is, where rows spread evenly."""

    rows: int
    scales: bool
    """More popular experts make it larger in proportion."""
    part: int
    """The sizes that were told together have the same number."""
    most: int
    """What all of the part are together at most, whatever the data."""


@dataclass(eq=False)
class StepGraph:
    """One rank's step: a flat graph of ATen operators, in the order in which they run.

    Every node's `meta` has: "value", a `Value` or a nested tuple or list of them, absent for numbers;
    "region" (`graph.regions`); "module", the name of the module whose forward or backward it is part of; "recomputed".
    What it does to memory, `memory_effects` tells; a target that is no operator says in "writes" which storages it
    changes. "when" is set where the graph is the body of a loop (`graph.accumulate`).
    """

    graph: fx.Graph
    inputs: list[Input]
    """In the order of the placeholders."""
    outputs: list[str]
    """Names, in the order of what the graph returns."""
    storages: list[Storage]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Real tensors that the step was written with, by the target of their get_attr node."""
    gradients: dict[int, str] = field(default_factory=dict)
    """Storage of a gradient to the name of its parameter."""
    sizes: dict[Any, fx.Node] = field(default_factory=dict)
    """Symbol of a size that depends on the data to the node that computes it; empty where none does."""
    even: dict[Any, Even] = field(default_factory=dict)
    """Symbol to what it is where tokens spread evenly, for `sizes.balanced_sizes`."""
    balanced: bool = False
    """The sizes are those of rows that spread evenly, whatever the data: right for costs, and never to be run."""
    groups: Mapping[str, CollectiveGroup] = field(default_factory=dict)
    """The process groups by name; read by `collective_groups.group_of`."""
    slots: Mapping[int, Slot] = field(default_factory=dict)
    """The places that storages have in other tiers, by the numbers that cache operators name."""
    short: Callable[[], StepGraph] | None = None
    """Makes the same step of the model with few of its layers, where those are alike: for trials of what is then
    applied to all. Passes rewrite it likewise, up to one that orders collectives or moves storages."""

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """What is computed, in order: no placeholders, constants and output."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outside(self) -> dict[int, Input]:
        """Each storage that the step does not make itself, and the input that brings it: of several the last."""
        return {
            value.storage: entry
            for entry, node in zip(self.inputs, self.placeholders, strict=True)
            for value in values_of(node)
        }

    @property
    def output(self) -> fx.Node:
        """The last node."""
        last: fx.Node = next(iter(reversed(self.graph.nodes)))
        assert last.op == "output"
        return last

    @property
    def returned(self) -> dict[str, fx.Node]:
        """Each output and the node that gives it; one node may give several."""
        return dict(zip(self.outputs, self.output.args[0], strict=True))  # type: ignore[arg-type]

    def copy(self) -> StepGraph:
        """Another graph of the same nodes, to be changed without changing this one."""
        return self.copied()[0]

    def copied(self, order: Sequence[fx.Node] | None = None) -> tuple[StepGraph, dict[fx.Node, fx.Node]]:
        """A copy, and which of its nodes each node of this graph became. Nodes keep their names. `order`: of the nodes
        that compute, in the copy; they then stand behind all placeholders and constants."""
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        nodes: Iterable[fx.Node] = self.graph.nodes
        if order is not None:
            given = [node for node in self.graph.nodes if node.op not in ("call_function", "output")]
            nodes = (*given, *order, self.output)
        for old in nodes:
            known[old] = append_copy(graph, old, known)
        sizes = {symbol: known[node] for symbol, node in self.sizes.items()}
        made = StepGraph(
            graph,
            list(self.inputs),
            list(self.outputs),
            list(self.storages),
            dict(self.constants),
            dict(self.gradients),
            sizes,
            dict(self.even),
            self.balanced,
            self.groups,
            self.slots,
        )
        return made, known


def values_of(node: fx.Node) -> Iterator[Value]:
    """The tensors that a node gives, one after the other."""
    return iter(flat_values(node.meta.get("value")))


def flat_values(value: Any) -> Sequence[Value]:
    """The tensors of a `meta["value"]`."""
    # Nearly all nodes give one tensor, and planners ask very often.
    if isinstance(value, Value):
        return (value,)
    if isinstance(value, tuple | list):
        return [one for part in value for one in flat_values(part)]
    return ()
