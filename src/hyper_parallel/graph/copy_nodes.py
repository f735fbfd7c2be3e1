"""Copies of a graph's nodes in a larger graph, with storages and data-dependent sizes of their own.

A step is written out from graphs that run several times in it: the micro-batch of a loop (`graph.expand`), the tasks of
a pipeline's stages (`runtime.rank_graph`). `GrowingGraph` is the graph that is written, `NodeCopies` the nodes that one
run of such a graph becomes in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from hyper_parallel.compat.fx_graph import Substitution, another_symbol, append_call, set_meta
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import CollectiveGroup, Even, Input, Size, StepGraph, Storage, Value, values_of
from hyper_parallel.graph.step_context import Region

_EMPTY, _COPY = torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default


class GrowingGraph:
    """A graph as it grows from copies of others."""

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

    def add_input(self, entry: Input, node: fx.Node, value: Value) -> None:
        """An input, like a placeholder of another graph but for its value; behind the inputs so far."""
        where = (
            contextlib.nullcontext()
            if self._last_input is None
            else self.graph.inserting_after(self._last_input)
        )
        with where:
            made = self._last_input = self.graph.placeholder(node.name)
        made.meta = {**node.meta, "value": value}
        self.inputs.append(entry)
        self.named[entry.name] = made

    def storage(self, size: Size, device: torch.device, name: str | None = None) -> int:
        """Memory of so many bytes, by its index."""
        index = len(self.storages)
        self.storages.append(Storage(index, size, device, name))
        return index

    def region(self, region: Region, by: int) -> Region:
        """A region of another micro-batch, later by so many."""
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
        made = append_call(
            self.graph, name, _EMPTY, arguments, {"dtype": value.dtype, "device": value.device}
        )
        made.meta = {**meta, "value": moved(value, index)}
        return made

    def own_copy(self, source: fx.Node, value: Value, meta: dict[str, Any]) -> fx.Node:
        """What a node gives, [as `value`], in memory of its own."""
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
        """A host point that is answered with a flat tensor like `answer`, in memory of its own. `writes`: storages that
        the host writes to."""
        index = self.storage(answer.bytes, answer.device)
        arguments = (point.value, list(shown), answer.elements)
        made = append_call(self.graph, f"host_{point.value}", HOST, arguments, {"dtype": answer.dtype})
        made.meta = {**_meta(region), "value": moved(answer, index)}
        if writes:
            made.meta["writes"] = set(writes)
        return made

    def call(self, target: Any, arguments: tuple[Any, ...], region: Region, value: Value) -> fx.Node:
        """A node that is in none of the graphs, with a value that lies in memory of the whole."""
        made = append_call(self.graph, target.__name__.partition(".")[0], target, arguments, {})
        made.meta = {**_meta(region), "value": value}
        return made

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
    """Of a node that is no copy."""
    return {"region": region, "module": "", "recomputed": False}


class NodeCopies:
    """What the nodes of a graph become in a larger one, of which it is one run."""

    def __init__(
        self, whole: GrowingGraph, body: StepGraph, suffix: str, by: int, *, as_is: bool = False
    ) -> None:
        """`suffix`: behind the names of nodes that `body` had before a pass changed it; `by`: the micro-batches
        between those of `body` and this run; `as_is`: storages and symbols are those of `body`."""
        self._whole, self._body, self._suffix, self._by = whole, body, suffix, by
        self._as_is = as_is
        self.made: dict[fx.Node, fx.Node] = {}
        self.storages: dict[int, int] = {}
        """Those of the body to those of the whole."""
        self._names: dict[str, str] = {}
        """Names of the body's nodes to what they became."""
        self._symbols = self._fresh_symbols()
        self._size = Substitution(self._symbols)

    def _fresh_symbols(self) -> dict[Any, Any]:
        """New symbols for the data-dependent sizes of the body."""
        whole, body = self._whole, self._body
        symbols = {symbol: symbol for symbol in body.sizes}
        known = (*whole.storages, *body.storages)
        like = next((one.bytes for one in known if isinstance(one.bytes, torch.SymInt)), None)
        fresh = False
        if like is not None and not self._as_is:
            fresh = True
            symbols = {symbol: another_symbol(like) for symbol in body.sizes}
        for symbol, even in body.even.items():
            if symbol in symbols:
                part = even.part + whole.parts
                whole.even[symbols[symbol]] = Even(even.rows, even.scales, part, even.most)
        whole.parts = 1 + max((even.part for even in whole.even.values()), default=-1)
        return symbols if fresh else {}

    def given(self, node: fx.Node, made: fx.Node) -> None:
        """A node of the body is this one of the whole, where its value lies then."""
        self.made[node] = made
        for old, new in zip(values_of(node), values_of(made), strict=True):
            self.storages[old.storage] = new.storage

    def constant(self, node: fx.Node, name: str) -> None:
        """A tensor that the body was written with, by its name in the whole."""
        whole, key = self._whole, f"constant {name}"
        if key not in whole.named:
            whole.constants[name] = self._body.constants[str(node.target)]
            made = whole.graph.create_node("get_attr", name)
            made.meta = {**node.meta, "value": self._placed(node.meta["value"])}
            whole.named[key] = made
        self.given(node, whole.named[key])

    def copy(self, node: fx.Node) -> fx.Node:
        """Append a copy of a node, whose arguments are known."""
        made = self.made.__getitem__
        args, kwargs = map_arg(node.args, made), map_arg(node.kwargs, made)
        new = append_call(self._whole.graph, node.name, node.target, args, kwargs)
        self._names[node.name] = new.name
        meta = node.meta.copy()
        meta["region"] = self._whole.region(meta["region"], self._by)
        if "value" in meta:
            meta["value"] = self._placed(meta["value"])
        if "writes" in meta:
            meta["writes"] = {self.storages[storage] for storage in meta["writes"]}
        if "origin" in meta:
            meta["origin"] = self._name(meta["origin"])
        if "chunk" in meta:
            name, piece = meta["chunk"]
            meta["chunk"] = (self._name(name), piece)
        set_meta(new, meta)
        self.made[node] = new
        return new

    def tell_sizes(self) -> None:
        """Have the whole know which nodes compute the data-dependent sizes of this run."""
        for symbol, node in self._body.sizes.items():
            self._whole.sizes[self._symbols.get(symbol, symbol)] = self.made[node]

    def _name(self, name: str) -> str:
        """Of a node of the body, or of what it was before, in this run."""
        return self._names.get(name, f"{name}{self._suffix}")

    def _placed(self, value: Any) -> Any:
        """A value, or a nest of them, where it lies in the whole."""
        if isinstance(value, Value):
            index = self.storages.get(value.storage)
            if index is None:
                index = self.storages[value.storage] = self._own_storage(value.storage)
            if not self._symbols:
                return value if index == value.storage else moved(value, index)
            shape = tuple(map(self._size, value.shape))
            stride = tuple(map(self._size, value.stride))
            return Value(shape, stride, value.dtype, value.device, index)
        if isinstance(value, tuple | list):
            return type(value)(self._placed(one) for one in value)
        return value

    def _own_storage(self, storage: int) -> int:
        if self._as_is:
            return storage
        one = self._body.storages[storage]
        return self._whole.storage(self._size(one.bytes), one.device)


def moved(value: Value, storage: int) -> Value:
    """The same value in another storage."""
    return Value(value.shape, value.stride, value.dtype, value.device, storage)
