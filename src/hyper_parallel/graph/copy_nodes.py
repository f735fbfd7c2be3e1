"""Copies of a graph's nodes in a larger graph, with storages and data-dependent sizes of their own.

A step is written out from graphs that run several times in it: the micro-batch of a loop (`graph.expand`), the tasks of
a pipeline's stages (`runtime.rank_graph`). `NodeCopies` are the nodes that one run of such a graph becomes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from hyper_parallel.compat.fx_graph import Substitution, another_symbol, append_call, set_meta
from hyper_parallel.graph.graph_writer import GrowingGraph
from hyper_parallel.graph.ir import Even, StepGraph, Value, mapped_value, values_of


class NodeCopies:
    """The nodes of a graph in a larger graph that contains one run of it."""

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

    def given(self, node: fx.Node, copy: fx.Node) -> None:
        """A node of the body is this one of the whole, where its value lies then."""
        self.made[node] = copy
        for old, new in zip(values_of(node), values_of(copy), strict=True):
            self.storages[old.storage] = new.storage

    def constant(self, node: fx.Node, name: str) -> None:
        """A tensor that the body was written with, by its name in the whole."""
        whole, key = self._whole, f"constant {name}"
        if key not in whole.named:
            whole.constants[name] = self._body.constants[str(node.target)]
            attribute = whole.graph.create_node("get_attr", name)
            attribute.meta = {**node.meta, "value": mapped_value(node.meta["value"], self._placed)}
            whole.named[key] = attribute
        self.given(node, whole.named[key])

    def copy(self, node: fx.Node) -> fx.Node:
        """Append a copy of a node, whose arguments are known."""
        copy_of = self.made.__getitem__
        args, kwargs = map_arg(node.args, copy_of), map_arg(node.kwargs, copy_of)
        new = append_call(self._whole.graph, node.name, node.target, args, kwargs)
        self._names[node.name] = new.name
        meta = node.meta.copy()
        meta["region"] = self._whole.region(meta["region"], self._by)
        if "value" in meta:
            meta["value"] = mapped_value(meta["value"], self._placed)
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
        """The name in this run of a node of the body, or of what it was before."""
        return self._names.get(name, f"{name}{self._suffix}")

    def _placed(self, value: Value) -> Value:
        """A value where it lies in the whole."""
        index = self.storages.get(value.storage)
        if index is None:
            index = self.storages[value.storage] = self._own_storage(value.storage)
        if not self._symbols:
            return value if index == value.storage else value.in_storage(index)
        shape = tuple(map(self._size, value.shape))
        stride = tuple(map(self._size, value.stride))
        return Value(shape, stride, value.dtype, value.device, index)

    def _own_storage(self, storage: int) -> int:
        if self._as_is:
            return storage
        one = self._body.storages[storage]
        return self._whole.storage(self._size(one.bytes), one.device)
