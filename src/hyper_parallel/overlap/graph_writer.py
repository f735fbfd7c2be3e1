"""Graph writer: inserts nodes with their metadata, replaces nodes, and removes what is unused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from hyper_parallel.graph import StepGraph, Storage, Value
from hyper_parallel.graph.dead_code import has_effect
from hyper_parallel.graph.recompute import moved_meta
from hyper_parallel.overlap.node_patterns import contiguous_strides, functional_call, tensor_value


class GraphWriter:
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
        made = Value(tuple(shape), contiguous_strides(shape), value.dtype, value.device, storage.index)
        self._step.storages.append(replace(storage, bytes=made.elements * value.dtype.itemsize))
        return self._node(target, args, made, kwargs)

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
