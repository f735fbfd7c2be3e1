"""Costs of each graph node: FLOPs and bytes (`Work`), or a `Collective`.

FLOPs of matrix products and attention stand in `graph.operator_costs`. Everything else:

    vector FLOPs = elements × FLOPs to each              elements of the largest of what it reads and writes
    read         = Σ bytes of its inputs, each once      an expanded dim counts once, a value given twice once
    written      = Σ bytes of its results, and of what it writes to in place
    fresh        = bytes of results in new memory

Views cost no bytes. What looks up rows (an embedding, `gather`, `index_select`) reads the rows and not the table; what
adds into rows of a tensor (`scatter_add_`, `index_put_`) reads and writes those rows. The numbers are one rank's, at
the sizes of the graph; sizes that the data decide are given.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.collectives import FUNCTIONAL
from hyper_parallel.compat.dispatch import leaves_of, mutated_arguments
from hyper_parallel.graph import host_nodes
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import Size, StepGraph, Value, group_of, is_collective, is_wait, values_of
from hyper_parallel.graph.memory_effects import is_view, touched
from hyper_parallel.graph.operator_costs import (
    ADDS_INTO,
    ADDS_UP,
    FLOPS,
    LOOKS_UP,
    MAKES,
    NOTHING,
    OVERWRITES,
    TOGETHER,
    attention,
    is_attention,
    operands_of,
    operator_name,
    product,
    work_kind,
)
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work


def costs(
    step: StepGraph, sizes: Mapping[Any, int] | None = None, nodes: Iterable[fx.Node] | None = None
) -> dict[fx.Node, Work | Collective]:
    """The work of every node that does some; host points, waits and numbers are left out.

    `nodes`: those that are asked about; left out, all. `sizes` gives the symbols of `step.sizes` values. Raises
    KeyError for a symbol without one, and CaptureError for a collective over a group that the capture was not told of.
    """
    pricer = Pricer(step, sizes)
    found: dict[fx.Node, Work | Collective] = {}
    for node in step.nodes if nodes is None else nodes:
        cost = pricer.cost(node)
        if cost is not None:
            found[node] = cost
    return found


@dataclass(frozen=True, slots=True)
class _Sized:
    """A value with its sizes as ints."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int
    like: int
    """The same for values of one shape, stride and dtype."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, self.stride


class Pricer:
    """Prices nodes of a step, or of the stages that it was cut into, each value's sizes worked out once."""

    def __init__(self, step: StepGraph, sizes: Mapping[Any, int] | None = None) -> None:
        self._step, self._sizes = step, dict(sizes or {})
        self._sized: dict[int, _Sized] = {}
        self._numbers: dict[int, int] = {}
        """Symbolic sizes by their identity, to what they are."""
        self._alive: list[Any] = []
        """What is known by its identity."""
        self._works: dict[Hashable, Work | None] = {}
        """By the likeness of the node: layers are alike."""
        self._likes: dict[Hashable, int] = {}
        self._forms: dict[
            tuple[int, int, torch.dtype], tuple[tuple[int, ...], tuple[int, ...], str, int, int]
        ] = {}
        """Shape and stride by their identity, and dtype, to all of a `_Sized` but its storage: copies share them."""

    def cost(self, node: fx.Node) -> Work | Collective | None:
        """The work of a node; None where it does nothing."""
        if is_collective(node):
            return self._collective(node)
        if host_nodes.is_update(node):
            return self._update(node)
        if is_wait(node) or node.target is HOST or not hasattr(node.target, "_schema"):
            return None
        kind = self._likeness(node)
        if kind not in self._works:
            self._works[kind] = self._work(node)
        return self._works[kind]

    def _likeness(self, node: fx.Node) -> Hashable:
        """What is equal for nodes that do the same, whatever they are called: `alike_layers.likeness` of one node, in a
        form that is quick to make."""
        places: dict[fx.Node | int, int] = {}
        """Of nodes and storages."""
        parts: list[Any] = [node.target]

        def add(arg: Any) -> None:
            if isinstance(arg, fx.Node):
                parts.append(fx.Node)
                parts.append(places.setdefault(arg, len(places)))
                for value in values_of(arg):
                    parts.append(self._of(value).like)
                    parts.append(places.setdefault(value.storage, len(places)))
            elif isinstance(arg, tuple | list):
                parts.append(tuple)
                for part in arg:
                    add(part)
                parts.append(None)
            elif isinstance(arg, Mapping):
                for key, value in arg.items():
                    parts.append(key)
                    add(value)
            else:
                # 1, 1.0 and True are equal, and not the same.
                parts.append(type(arg))
                parts.append(arg)

        add(node.args)
        add(node.kwargs)
        add(node)
        return tuple(parts)

    def _work(self, node: fx.Node) -> Work | None:
        target: Any = node.target
        name = operator_name(node)
        if name in NOTHING:
            return None
        op = f"{target.namespace}.{target.__name__}"
        if name in ("_local_scalar_dense", "item"):
            return Work("host", op=op)
        if is_view(node):
            return Work("view", op=op, dtype=self._dtype(node))
        work = self._product(node, name, op) or self._attention(node, name, op)
        return work or self._plain(node, name, op)

    def _update(self, node: fx.Node) -> Work:
        """Work of the host: each call walks over its storages once."""
        calls = host_nodes.calls_of(node)
        read = sum(value.bytes for call in calls for value in self._moved((call.args, call.kwargs)))
        wrote, flops = 0, 0.0
        for call in calls:
            name = str(call.operator.__name__).split(".")[0].rstrip("_")
            into = list(self._moved(list(mutated_arguments(call.operator, call.args, call.kwargs))))
            wrote += sum(value.bytes for value in into)
            if name in ("_fused_adamw", "_fused_adam"):
                wrote -= sum(value.bytes for value in self._moved(call.args[1]))
            flops += FLOPS.get(name, 1.0) * max((value.elements for value in into), default=0)
        return Work("optimizer", vector_flops=flops, read=read, written=wrote, op="update")

    def _moved(self, tree: Any) -> Iterator[_Sized]:
        """The values in an update's slots among arguments."""
        return (self._of(leaf.value) for leaf in leaves_of(tree) if isinstance(leaf, host_nodes.Moved))

    def _collective(self, node: fx.Node) -> Collective:
        group = group_of(self._step, node)
        kind, _ = FUNCTIONAL[str(getattr(node.target, "__name__", "")).split(".")[0]]
        given = sum(value.bytes for value in self._flat(node.args[0]))
        return Collective(kind, group.ranks, given, group.axis, group.axis)

    def _product(self, node: fx.Node, name: str, op: str) -> Work | None:
        places = operands_of(name)
        if places is None:
            return None
        a, b = (next(self._flat(node.args[place])) for place in places)
        results = self._results(node)
        flops, shape, layout = product(name, a.matrix, b.matrix, [value.shape for value in results])
        # A bias is added to every element.
        adds = (
            float(sum(value.elements for value in results)) if name in ("addmm", "baddbmm", "addmv") else 0.0
        )
        return replace(
            self._plain(node, name, op),
            kind="matmul",
            flops=flops,
            vector_flops=adds,
            dtype=a.dtype,
            shape=shape,
            layout=layout,
        )

    def _attention(self, node: fx.Node, name: str, op: str) -> Work | None:
        if not is_attention(name):
            return None
        given = _by_name(node)
        shapes = {key: next(self._flat(given[key])).shape for key in ("query", "key", "value")}
        windows = (given.get("window_size_left"), given.get("window_size_right"))
        flops, shape, layout = attention(name, shapes, bool(given.get("is_causal")), windows)
        return replace(
            self._plain(node, name, op),
            kind="attention",
            flops=flops,
            vector_flops=0,
            dtype=next(self._flat(given["query"])).dtype,
            shape=shape,
            layout=layout,
        )

    def _plain(self, node: fx.Node, name: str, op: str) -> Work:
        """Bytes and vector FLOPs of an operator that is no product."""
        given = list(
            {id(value): value for arg in (node.args, node.kwargs) for value in self._flat(arg)}.values()
        )
        into = [
            value
            for arg in mutated_arguments(node.target, node.args, node.kwargs)
            for value in self._flat(arg)
        ]
        results = self._results(node)
        old = touched(node)
        fresh = [value for value in results if value.storage not in old]
        written = float(sum(value.bytes for value in fresh))
        read = float(sum(value.bytes for value in given))
        wrote = written + sum(value.bytes for value in into)
        if name in MAKES:
            # What they are made like is only asked for its shape.
            read = 0.0
        elif name in LOOKS_UP and given:
            read += written - next(self._flat(node.args[0])).bytes
        elif name in ADDS_INTO and given:
            whole = next(self._flat(node.args[0])).bytes
            source = max((value.bytes for value in given[1:]), default=0)
            changed = min(whole, source)
            # In place only what is added to is touched; otherwise all of it is copied first.
            read, wrote = (read - whole + changed, changed) if into else (read + changed, written + changed)
        elif name in OVERWRITES and into:
            read -= sum(value.bytes for value in into)
        elif name in ("_fused_adamw", "_fused_adam"):
            # Gradients are declared as written to, and are only with a scaler.
            wrote -= sum(value.bytes for value in self._flat(node.args[1]))
        kind = work_kind(name)
        strided = _across(node, given) if name in ADDS_UP else _strided(given, [*fresh, *into])
        layout = "strided" if strided else str(node.kwargs.get("approximate", ""))
        elements = max((value.elements for value in (*given, *results)), default=0)
        if kind == "optimizer":
            elements = sum(value.elements for value in self._flat(node.args[0]))
        return Work(
            kind,
            vector_flops=0.0 if kind == "copy" else elements * FLOPS.get(name, 1.0),
            read=read,
            written=wrote,
            dtype=self._dtype(node),
            op=op,
            layout=layout if layout != "none" else "",
            fresh=written,
        )

    def _dtype(self, node: fx.Node) -> str:
        """The dtype of the largest input; of the largest result where there is none."""
        values = [*self._flat(node.args), *self._flat(node.kwargs)] or self._results(node)
        return max(values, key=lambda value: value.bytes).dtype if values else "float32"

    def _results(self, node: fx.Node) -> list[_Sized]:
        return [self._of(value) for value in values_of(node)]

    def _flat(self, arg: Any) -> Iterator[_Sized]:
        """The values of all nodes in an argument."""
        if isinstance(arg, fx.Node):
            for value in values_of(arg):
                yield self._of(value)
        elif isinstance(arg, tuple | list):
            for part in arg:
                yield from self._flat(part)
        elif isinstance(arg, Mapping):
            yield from self._flat(list(arg.values()))

    def _of(self, value: Value) -> _Sized:
        found = self._sized.get(id(value))
        if found is None:
            self._alive.append(value)
            key = (id(value.shape), id(value.stride), value.dtype)
            form = self._forms.get(key)
            if form is None:
                form = self._forms[key] = self._form(value)
            shape, stride, dtype, size, like = form
            found = self._sized[id(value)] = _Sized(shape, stride, dtype, size, value.storage, like)
        return found

    def _form(self, value: Value) -> tuple[tuple[int, ...], tuple[int, ...], str, int, int]:
        """All of a `_Sized` but the storage."""
        shape = tuple([self._known(size) for size in value.shape])
        stride = tuple([self._known(size) for size in value.stride])
        like = self._likes.setdefault((shape, stride, value.dtype), len(self._likes))
        # As of `Value.bytes`, of numbers: products of symbols take long.
        size = value.dtype.itemsize
        for length, step in zip(shape, value.stride, strict=True):
            if not (isinstance(step, int) and step == 0):
                size *= length
        return shape, stride, str(value.dtype).removeprefix("torch."), size, like

    def _known(self, size: Size) -> int:
        if type(size) is int:
            return size
        number = self._numbers.get(id(size))
        if number is None:
            self._alive.append(size)
            number = self._numbers[id(size)] = known(size, self._sizes)
        return number


def _by_name(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names of its operator's schema."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _strided(given: list[_Sized], results: list[_Sized]) -> bool:
    """Whether the largest values lie in memory in different orders, or in pieces, so that it is walked in jumps."""
    values = [value for value in (*given, *results) if 0 not in value.stride]
    large = max((value.elements for value in values), default=0)
    orders = {_order(value) for value in values if value.elements * 2 > large}
    return len(orders) > 1 or None in orders


def _order(value: _Sized) -> tuple[int, ...] | None:
    """The order of a value's dims in memory, the outermost first; None where what lies together is short."""
    dims = sorted(
        (-stride, at, size)
        for at, (size, stride) in enumerate(zip(value.shape, value.stride, strict=True))
        if size > 1
    )
    together = 1
    for stride, _, size in reversed(dims):
        if -stride != together:
            break
        together *= size
    if together < min(TOGETHER, value.elements):
        return None
    found = tuple(at for _, at, _ in dims)
    # In order, whatever the number of dims.
    return () if list(found) == sorted(found) else found


def _across(node: fx.Node, given: list[_Sized]) -> bool:
    """Whether a reduction adds up numbers that are not neighbours."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not given or not isinstance(dims, tuple | list) or not dims:
        return False
    value = given[0]
    inner = min(range(len(value.shape)), key=lambda at: (value.shape[at] == 1, value.stride[at]), default=-1)
    return inner not in [dim % len(value.shape) for dim in dims if isinstance(dim, int)]
