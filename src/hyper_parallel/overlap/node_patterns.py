"""Patterns of graph nodes that chunking looks for: products, reshapes, waits, contiguous values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph import StepGraph, Storage, Value
from hyper_parallel.graph.graph_writer import moved_meta
from hyper_parallel.graph.ir import is_collective, is_wait
from hyper_parallel.graph.memory_effects import has_effect

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


class StepEditor:
    """Puts nodes into a graph with all that a node must know of itself."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._place: fx.Node = step.output
        self._like: fx.Node = step.output
        self._moved: dict[int, int] = {}
        """Storage of what was replaced to the storage that took its place."""
        self._unused: list[fx.Node] = []

    def at(self, place: fx.Node, like: fx.Node | None = None) -> Any:
        """What is made in the block stands before `place`, and belongs where `like` belongs."""
        self._place, self._like = place, like or place
        return self._step.graph.inserting_before(place)

    def new(
        self, target: Any, args: tuple[Any, ...], shape: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A node whose result is a new contiguous tensor, of the dtype of what it stands in for."""
        value = tensor_value(self._like)
        storage = Storage(len(self._step.storages), 0, value.device)
        value_of_view = Value(
            tuple(shape), contiguous_strides(shape), value.dtype, value.device, storage.index
        )
        self._step.storages.append(replace(storage, bytes=value_of_view.elements * value.dtype.itemsize))
        return self._node(target, args, value_of_view, kwargs)

    def view(
        self,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[Any],
        stride: Sequence[Any],
        source: fx.Node,
    ) -> fx.Node:
        """A node whose result lies in the memory of `source`."""
        return self._node(
            target, args, replace(tensor_value(source), shape=tuple(shape), stride=tuple(stride))
        )

    def waited(self, wait: fx.Node, begun: fx.Node) -> fx.Node:
        """The wait for a collective."""
        return self._node(wait.target, (begun,), tensor_value(begun))

    def replaced(self, node: fx.Node, instead: fx.Node) -> None:
        """Whoever used `node` uses `instead`."""
        self._moved[tensor_value(node).storage] = tensor_value(instead).storage
        node.replace_all_uses_with(instead)
        self._unused.append(node)

    def unused(self, wait: fx.Node) -> None:
        """Nobody but views that nobody looks at uses what was waited for."""
        self._unused.append(wait)

    def finish(self) -> None:
        """Take out what was replaced, and say of what is left where it lies now."""
        pending, gone = list(self._unused), set()
        while pending:
            node = pending.pop()
            pending += [user for user in node.users if not user.users and user not in gone]
            if node.users or node in gone or (has_effect(node) and not functional_call(node)):
                continue
            gone.add(node)
            sources = node.all_input_nodes
            self._step.graph.erase_node(node)
            pending += [source for source in sources if not source.users]
        if self._moved:
            for node in self._step.nodes:
                node.meta = moved_meta(node, self._moved)

    def _node(
        self, target: Any, args: tuple[Any, ...], value: Value, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        node = self._step.graph.call_function(target, args, dict(kwargs or {}))
        like = self._like.meta
        node.meta = {key: like[key] for key in ("region", "module", "recomputed", "when") if key in like}
        node.meta.update(value=value, origin=like.get("origin", self._like.name))
        return node
