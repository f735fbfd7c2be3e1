"""Sizes that depend on the data, as nodes of the graph: what the host reads from a tensor, and arithmetic on it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from hyper_parallel.compat.symbols import expression, floor_division


class Sizes:
    """Turns symbolic numbers into nodes. Every symbol is bound to the node that gives it before it is used."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self.nodes: dict[Any, fx.Node] = {}

    def bind(self, number: Any, node: fx.Node) -> None:
        """`node` computes `number`."""
        found = expression(number)
        if found.free_symbols:
            self.nodes.setdefault(found, node)

    def bind_value(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Symbols that appear first in a tensor's shape are read off the tensor."""
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and expression(size).is_Symbol:
                found = expression(size)
                if found not in self.nodes:
                    self.nodes[found] = self._graph.call_function(torch.ops.aten.sym_size.int, (node, dim))

    def argument(self, number: Any) -> Any:
        """An int where the number is known, else a node."""
        return self._lower(expression(number))

    def _lower(self, found: Any) -> Any:
        if found.is_Integer:
            return int(found)
        if found in self.nodes:
            return self.nodes[found]
        self.nodes[found] = node = self._computed(found)
        return node

    def _computed(self, found: Any) -> fx.Node:
        parts = [self._lower(part) for part in found.args]
        folds: dict[type, Callable[[Any, Any], Any]] = {
            sympy.Add: operator.add,
            sympy.Mul: operator.mul,
            sympy.Max: max,
            sympy.Min: min,
        }
        for kind, fold in folds.items():
            if isinstance(found, kind):
                node: fx.Node = functools.reduce(
                    lambda a, b, fold=fold: self._graph.call_function(fold, (a, b)),  # type: ignore[misc]
                    parts,
                )
                return node
        if floor_division(found):
            return self._graph.call_function(operator.floordiv, tuple(parts))
        raise NotImplementedError(f"a size of the form {found} ({type(found).__name__})")


def known(number: Any, values: dict[Any, int]) -> int:
    """A size as an int: symbols take the `values` that they are given.

    Raises KeyError for a symbol without one.
    """
    if isinstance(number, int):
        return number
    found = expression(number)
    missing = found.free_symbols - values.keys()
    if missing:
        raise KeyError(next(iter(missing)))
    return int(found.subs(values))
