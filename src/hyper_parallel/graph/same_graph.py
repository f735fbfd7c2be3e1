"""Equality of captured graphs: node by node, up to the numbers of storages, the names of nodes and symbols of sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.symbolic_sizes import expression
from hyper_parallel.graph.ir import Size, StepGraph, Value


def difference(one: StepGraph, other: StepGraph) -> str | None:
    """The first thing in which two graphs differ, in words; None where they are the same.

    Same are operators, their order and arguments, values with their shapes, strides and storages, sizes of storages,
    regions, modules, inputs, outputs, gradients, data-dependent sizes and constants.
    """
    return _Comparison(one, other).result()


class _Unequal(Exception):
    """The graphs differ."""


class _Comparison:
    def __init__(self, one: StepGraph, other: StepGraph) -> None:
        self._one, self._other = one, other
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, int] = {}
        self._symbols: dict[Any, Any] = {}
        self._parts: dict[int, int] = {}

    def result(self) -> str | None:
        """As of `difference`."""
        try:
            self._compare()
        except _Unequal as error:
            return str(error)
        return None

    def _compare(self) -> None:
        one, other = self._one, self._other
        here, there = list(one.graph.nodes), list(other.graph.nodes)
        for a, b in zip(here, there, strict=False):
            if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
                raise _Unequal(f"{label(a)} is {label(b)}")
            self._nodes[a] = b
        _equal(len(here), len(there), "numbers of nodes")
        _equal(one.inputs, other.inputs, "inputs")
        _equal(one.outputs, other.outputs, "outputs")
        _equal(one.balanced, other.balanced, "balanced")
        self._pair_symbols()
        for a, b in zip(here, there, strict=True):
            self._node(a, b)
        _equal(self._renamed(one.gradients), other.gradients, "gradients")
        self._even()
        for index, to in self._storages.items():
            mine, its = one.storages[index], other.storages[to]
            if not self._same_size(mine.bytes, its.bytes) or (mine.device, mine.name) != (
                its.device,
                its.name,
            ):
                raise _Unequal(f"storage {mine} is {its}")

    def _renamed(self, gradients: Mapping[int, str]) -> dict[int, str]:
        return {self._storages.get(storage, -1): name for storage, name in gradients.items()}

    def _pair_symbols(self) -> None:
        """Symbols are the same where the same nodes compute them."""
        by_node = {node: symbol for symbol, node in self._other.sizes.items()}
        for symbol, node in self._one.sizes.items():
            if self._nodes[node] not in by_node:
                raise _Unequal(f"{label(node)} computes a size in one of them alone")
            self._symbols[symbol] = by_node[self._nodes[node]]
        _equal(len(self._one.sizes), len(self._other.sizes), "numbers of sizes")

    def _even(self) -> None:
        one = {self._symbols.get(symbol): even for symbol, even in self._one.even.items()}
        one.pop(None, None)
        other = {symbol: even for symbol, even in self._other.even.items() if symbol in one}
        _equal(len(one), len(other), "numbers of expected sizes")
        for symbol, even in one.items():
            its = other[symbol]
            part = self._parts.setdefault(even.part, its.part)
            if (even.rows, even.scales, part, even.most) != (its.rows, its.scales, its.part, its.most):
                raise _Unequal(f"{even} is {its}")
        _equal(len(set(self._parts.values())), len(self._parts), "parts of expected sizes")

    def _node(self, a: fx.Node, b: fx.Node) -> None:
        for key in ("region", "module", "recomputed"):
            if a.meta.get(key) != b.meta.get(key):
                raise _Unequal(f"{label(a)}: {key} {a.meta.get(key)} is {b.meta.get(key)}")
        if a.op == "get_attr":
            mine, its = self._one.constants[str(a.target)], self._other.constants[str(b.target)]
            if mine.dtype != its.dtype or not torch.equal(mine, its):
                raise _Unequal(f"constant {a.target} has other values than {b.target}")
        if not (self._same(a.args, b.args) and self._same(a.kwargs, b.kwargs)):
            raise _Unequal(f"{label(a)}{a.args} has other arguments than {label(b)}{b.args}")
        if not self._same(a.meta.get("value"), b.meta.get("value")):
            raise _Unequal(f"{label(a)}: {a.meta.get('value')} is {b.meta.get('value')}")

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return self._nodes.get(a) is b
        if isinstance(a, Value):
            return isinstance(b, Value) and self._same_value(a, b)
        if isinstance(a, tuple | list):
            return (
                isinstance(b, tuple | list)
                and len(a) == len(b)
                and all(self._same(x, y) for x, y in zip(a, b, strict=True))
            )
        if isinstance(a, Mapping):
            return a.keys() == b.keys() and all(self._same(a[key], b[key]) for key in a)
        return same_number(a, b)

    def _same_value(self, a: Value, b: Value) -> bool:
        known = self._storages.setdefault(a.storage, b.storage)
        return (
            known == b.storage
            and (a.dtype, a.device, len(a.shape)) == (b.dtype, b.device, len(b.shape))
            and all(map(self._same_size, a.shape, b.shape))
            and all(map(self._same_size, a.stride, b.stride))
        )

    def _same_size(self, a: Size, b: Size) -> bool:
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        mine, its = expression(a), expression(b)
        if mine.is_Symbol and its.is_Symbol:
            return bool(self._symbols.setdefault(mine, its) == its)
        return bool(mine.xreplace(self._symbols) == its)


def same_number(a: Any, b: Any) -> bool:
    """Whether two arguments that are no nodes are the same: 1, 1.0 and True are equal, and not the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _equal(one: object, other: object, what: str) -> None:
    if one != other:
        if isinstance(one, Sequence) and isinstance(other, Sequence):
            pair = next(((a, b) for a, b in zip(one, other, strict=False) if a != b), (len(one), len(other)))
            raise _Unequal(f"{what}: {pair[0]} is {pair[1]}")
        raise _Unequal(f"{what}: {one} is {other}")


def label(node: fx.Node) -> str:
    """A node in words."""
    return f"{node.name} ({node.meta.get('module') or 'no module'}, {node.meta['region'].phase})"
