"""Patterns of graph nodes that chunking looks for: products, reshapes, waits, contiguous values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph import Value
from hyper_parallel.graph.collective_groups import is_collective, is_wait

_aten = torch.ops.aten
RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.alias.default})


def column_sources(node: fx.Node) -> list[Any] | None:
    """What the columns of a node's result come from, column by column; None where they do not."""
    if is_product(node):
        return []
    if node.target is _aten.add.Tensor and not node.kwargs:
        shapes = [tensor_value(arg).shape for arg in node.args if isinstance(arg, fx.Node)]
        same = len(shapes) == 2 and all(
            same_shape(shape, tensor_value(node).shape) and is_contiguous(arg)
            for shape, arg in zip(shapes, node.all_input_nodes, strict=False)
        )
        return list(node.args) if same and node.args[0] is not node.args[1] else None
    if node.target in RESHAPES:
        source = node.all_input_nodes[0]
        return (
            [source] if same_shape(tensor_value(source).shape[-1:], tensor_value(node).shape[-1:]) else None
        )
    if node.target is _aten.index.Tensor:
        rows, places = node.args
        by_rows = isinstance(places, list | tuple) and len(places) == 1 and isinstance(places[0], fx.Node)
        return [rows] if by_rows and len(tensor_value(rows).shape) == 2 else None
    return None


def is_product(node: fx.Node) -> bool:
    """Whether its columns are those of its second operand."""
    if node.target is _aten.mm.default:
        return True
    if not str(node.target).endswith("grouped_mm.default"):
        return False
    shapes = [tensor_value(arg).shape for arg in node.args[:2] if isinstance(arg, fx.Node)]
    return [len(shape) for shape in shapes] == [2, 3]


def functional_call(node: fx.Node) -> bool:
    """Whether a node is a functional collective or a wait for one."""
    return is_collective(node) or is_wait(node)


def only_wait(begin: fx.Node) -> fx.Node | None:
    """The wait that is the only user of a collective; None where it has others."""
    users = list(begin.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def is_contiguous(node: fx.Node, dims: int | None = None) -> bool:
    """Whether a node gives one contiguous tensor, of a number of columns that is known."""
    value = node.meta.get("value")
    if not isinstance(value, Value) or not value.shape or not isinstance(value.shape[-1], int):
        return False
    if dims is not None and (
        len(value.shape) != dims or not all(isinstance(size, int) for size in value.shape)
    ):
        return False
    wanted = contiguous_strides(value.shape)
    return all(
        str(size) == "1" or str(stride) == str(want)
        for size, stride, want in zip(value.shape, value.stride, wanted, strict=True)
    )


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes are equal; sizes that the data decide by their expressions, which asks the data nothing."""
    return len(one) == len(other) and all(str(a) == str(b) for a, b in zip(one, other, strict=True))


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides of a contiguous tensor of this shape, in elements."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def tensor_value(node: Any) -> Value:
    """The Value of a node that gives one tensor."""
    value = node.meta["value"]
    assert isinstance(value, Value), f"{node} gives one tensor"
    return value
