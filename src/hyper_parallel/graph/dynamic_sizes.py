"""Dynamic sizes as graph nodes: data-dependent symbols, read by the host from tensors.

Rows that experts get are counted in parts: those that come from each rank, those of each local expert. What lies in
memory is as large as a whole part, however it is made up, so that a bound on the part is one on every storage:

    rows of a part ≤ min(load · Σ even rows, the most there can be)      `largest_sizes`
    load = rows that came / their even share, the largest of all ranks   what stops a run (`expert_overflow`)
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from hyper_parallel.compat.fx_graph import expression, floor_division, is_symbolic, not_negative
from hyper_parallel.errors import BudgetError, CaptureError
from hyper_parallel.graph.ir import Even, StepGraph
from hyper_parallel.graph.step_context import current_step

ROUNDING = 2.0**-20
"""A load is measured in fp32: so much more than was allowed may be taken for it."""


class Sizes:
    """Turns symbolic numbers into nodes. Every symbol is bound to the node that gives it before it is used."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self.nodes: dict[Any, fx.Node] = {}
        self.even: dict[Any, Even] = {}
        """What `expected` says of these sizes, while it is the record of the `StepContext`."""

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
        parts = [self._lower(part) for part in _in_order(found)]
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
        raise CaptureError(
            f"a size is {found}, which this engine cannot compute in a graph ({type(found).__name__})"
        )


def _in_order(found: Any) -> Sequence[Any]:
    """The arguments of an expression. sympy sorts those of sums and products by name, u10 in front of u9, so that
    layers that are alike would compute them in different orders."""
    if isinstance(found, sympy.Add | sympy.Mul):
        return sorted(found.args, key=lambda part: (len(str(part)), str(part)))
    return tuple(found.args)


def expected(numbers: Sequence[int], even: Sequence[int], scales: bool, most: int | None = None) -> None:
    """Tell what `numbers`, read from a tensor, are where rows spread evenly; nothing happens outside of a capture.

    They may be taken for sizes of tensors from here on. `scales`: they grow with the popularity of this rank's experts.
    `most`: what all together are at most; left out, they are always as many as where rows spread evenly.
    """
    known_even = current_step().even_sizes
    if known_even is None:
        return
    part = 1 + max((known.part for known in known_even.values()), default=-1)
    for number, rows in zip(numbers, even, strict=True):
        if is_symbolic(number):
            not_negative(number)
            found = expression(number)
            if found.is_Symbol:
                known_even[found] = Even(rows, scales, part, sum(even) if most is None else most)


def balanced_sizes(step: StepGraph, load: float = 1.0) -> dict[Any, int]:
    """Each symbol of the step to the rows that it stands for where they spread evenly, this rank's experts `load` times
    as popular as the mean.

    Raises CaptureError when the step has a size of which nothing is known.
    """
    _check_told(step)
    return {
        symbol: round(even.rows * load) if even.scales else even.rows for symbol, even in step.even.items()
    }


def largest_sizes(step: StepGraph, load: float) -> dict[Any, int]:
    """Each symbol of the step to rows with which every storage is as large as it can be, where a rank gets at most
    `load` times its even share of the rows.

    Raises CaptureError when the step has a size of which nothing is known, BudgetError for a storage that is not as
    large as whole parts of the rows, so that how they are made up matters.
    """
    _check_told(step)
    parts: dict[int, list[Any]] = defaultdict(list)
    for symbol, even in step.even.items():
        parts[even.part].append(symbol)
    _check_whole(step, parts)
    found = {}
    for symbols in parts.values():
        sizes_of_part = [step.even[symbol] for symbol in symbols]
        most = min(even.most for even in sizes_of_part)
        if all(even.scales for even in sizes_of_part):
            most = min(most, math.floor(load * (1 + ROUNDING) * sum(even.rows for even in sizes_of_part)))
        each, more = divmod(most, len(symbols))
        found.update({symbol: each + (at < more) for at, symbol in enumerate(symbols)})
    return found


def uncertain(step: StepGraph) -> bool:
    """Whether some size of the step is one that only the data decide."""
    return any(not isinstance(storage.bytes, int) for storage in step.storages)


def _check_told(step: StepGraph) -> None:
    unknown = [str(symbol) for symbol in step.sizes if symbol not in step.even]
    if unknown:
        raise CaptureError(
            f"the sizes {', '.join(sorted(unknown)[:5])} depend on the data, and nobody told what they are on average; "
            "give them values, or tell them in the model's code (hyper_parallel.graph.dynamic_sizes.expected)"
        )


def _check_whole(step: StepGraph, parts: Mapping[int, Sequence[Any]]) -> None:
    sizes = {expression(storage.bytes) for storage in step.storages if not isinstance(storage.bytes, int)}
    for size in sorted(sizes, key=str):
        terms = size.expand().as_coefficients_dict()
        parts_of = {step.even[symbol].part for symbol in size.free_symbols}
        linear = all(term.is_Symbol or term.is_Integer for term in terms)
        whole = all(len({terms[symbol] for symbol in parts[part]}) == 1 for part in parts_of)
        if not linear or not whole:
            raise BudgetError(
                f"a tensor of the step has {size} bytes, of which no bound is known: it holds a part of the rows that "
                "experts get and not all of them; leave strategy.memory.device out for this model"
            )


def known(number: Any, values: Mapping[Any, int]) -> int:
    """A size as an int: symbols take the `values` that they are given.

    Raises KeyError for a symbol without one.
    """
    if isinstance(number, int):
        return number
    found = expression(number)
    return _valued(found, tuple(values[symbol] for symbol in _symbols(found)))


@functools.lru_cache(maxsize=1 << 16)
def _symbols(found: Any) -> tuple[Any, ...]:
    return tuple(found.free_symbols)


@functools.lru_cache(maxsize=1 << 16)
def _valued(found: Any, values: tuple[int, ...]) -> int:
    numbers = map(sympy.Integer, values)
    return int(found.xreplace(dict(zip(_symbols(found), numbers, strict=True))))
