"""A captured step as bytes: plain data and tensors, so that reading it runs no code.

    magic · blake2b of the rest · length · what is said about it · length · data · length · short · constants

What is said about it and the data are JSON, deflated, each by itself: the first is read more often. Constants are
safetensors; `short` is a file of this form of the step with few of its layers (`StepGraph.short`), or nothing.

Operators are written by their qualified names, process groups by axis and ranks, since their names differ from process
to process, and sizes that depend on the data as expressions of their symbols. What has no such form is refused
(`Unwritable`), and never guessed. What is read has the nodes, names, arguments, `meta` and storages of what was
written.
"""

from __future__ import annotations

import builtins
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import fx

from hyper_parallel.compat.fx_graph import (
    SymbolReader,
    append_node,
    expression,
    is_symbolic,
    set_meta,
    written,
)
from hyper_parallel.graph.artifacts import Unreadable, deflated, inflated, opened, sealed
from hyper_parallel.graph.ir import CollectiveGroup, Even, Input, StepGraph, Storage, Value
from hyper_parallel.graph.step_context import Region

_MAGIC = b"hyper_parallel step graph 3\n"
_OPS = ("call_function", "placeholder", "get_attr", "output")
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")),
        (builtins, ("max", "min")),
    )
    for name in names
}
"""What else than operators computes sizes and takes results apart."""
_META = frozenset({"value", "region", "module", "recomputed"})
_FURTHER = ("when", "origin", "writes", "chunk")
_ABSENT, _NOTHING, _SEVERAL = -1, -2, -3
"""In the place of a value's kind: no value, the value None, several values."""


Kind = tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype, torch.device]
"""Shape, stride, dtype and device of values."""


class Unwritable(Exception):
    """A graph has something that has no form as plain data."""


def to_bytes(step: StepGraph, about: Any = None, short: StepGraph | None = None) -> bytes:
    """A graph, plain data `about` it, and its short step where it is wanted. Raises Unwritable."""
    if step.slots or step.balanced:
        raise Unwritable("a graph with slots in other tiers, or for costs only, is not written")
    if any(not tensor.is_contiguous() for tensor in step.constants.values()):
        raise Unwritable("a constant is not contiguous")
    try:
        data = _Writer(step).data()
    except ValueError as error:
        raise Unwritable(str(error)) from error
    few = b"" if short is None else to_bytes(short)
    parts = (deflated(about), deflated(data), len(few).to_bytes(8, "big"), few)
    return sealed(_MAGIC, b"".join((*parts, safetensors.save(dict(step.constants)))))


def about(content: bytes) -> Any:
    """The plain data about the graph that was written. Raises Unreadable for bytes that are damaged."""
    return inflated(opened(_MAGIC, content), 0)[0]


def from_bytes(content: bytes, groups: Mapping[str, CollectiveGroup]) -> tuple[StepGraph, Any]:
    """The graph, and the plain data about it. `groups`: this process's, by name.

    Raises Unreadable for bytes that are damaged, and where an operator or a group is missing here.
    """
    body = opened(_MAGIC, content)
    raw, end = inflated(body, 0)
    data, end = inflated(body, end)
    begin = end + 8
    end = begin + int.from_bytes(body[end:begin], "big")
    few = body[begin:end]
    constants = safetensors.load(body[end:])
    try:
        step = _Reader(data, constants, groups).step()
        if few:
            # Made when it is wanted: under a budget alone.
            step.short = lambda: from_bytes(few, groups)[0]
        return step, raw
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def groups_of(written: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Axis and ranks of groups as `group_rows` gave them."""
    return [(axis, tuple(ranks)) for axis, ranks in written]


def group_rows(groups: Mapping[str, CollectiveGroup]) -> list[Any]:
    """Axis and ranks of each group as plain data, in order."""
    return [[group.axis, list(group.ranks)] for group in groups.values()]


@dataclass
class _Table:
    """Rows that are written once each."""

    rows: list[Any] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def index(self, row: Any) -> int:
        key = json.dumps(row)
        if key not in self._known:
            self._known[key] = len(self.rows)
            self.rows.append(row)
        return self._known[key]


class _Writer:
    """One graph as plain data."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._numbers = {node: number for number, node in enumerate(step.graph.nodes)}
        self._constants, self._kinds, self._regions = _Table(), _Table(), _Table()
        self._kind_of: dict[tuple[Any, ...], int] = {}
        self._targets: dict[int, int] = {}
        self._names: list[str] = []

    def data(self) -> dict[str, Any]:
        step = self._step
        rows = [self._row(node) for node in step.graph.nodes]
        symbols = {symbol: self._symbol(symbol) for symbol in {**step.sizes, **step.even}}
        return {
            "rows": rows,
            "inputs": [[entry.name, entry.kind] for entry in step.inputs],
            "outputs": step.outputs,
            "storages": [
                [one.index, self._plain(one.bytes), str(one.device), one.name] for one in step.storages
            ],
            "gradients": list(step.gradients.items()),
            "sizes": [[symbols[symbol], self._numbers[node]] for symbol, node in step.sizes.items()],
            "even": [
                [symbols[symbol], even.rows, even.scales, even.part, even.most]
                for symbol, even in step.even.items()
            ],
            "groups": group_rows(step.groups),
            "targets": self._names,
            "constants": self._constants.rows,
            "kinds": self._kinds.rows,
            "regions": self._regions.rows,
        }

    def _row(self, node: fx.Node) -> list[Any]:
        meta = node.meta
        further = [[key, self._plain(meta[key])] for key in _FURTHER if key in meta]
        if len(further) + len(meta.keys() & _META) < len(meta) or node.type is not None:
            unknown = sorted(meta.keys() - _META - set(_FURTHER))
            raise Unwritable(f"{node} ({node.target}) has {', '.join(unknown) or 'a type'}")
        kind, storage = self._value(meta["value"]) if "value" in meta else (_ABSENT, 0)
        region = -1
        if "region" in meta:
            of = meta["region"]
            region = self._regions.index(
                [of.layer, of.micro_batch, of.phase, meta.get("module"), meta.get("recomputed")]
            )
        return [
            _OPS.index(node.op),
            node.name,
            self._target(node),
            [self._argument(one) for one in node.args],
            [[key, self._argument(one)] for key, one in node.kwargs.items()],
            kind,
            storage,
            region,
            further,
        ]

    def _target(self, node: fx.Node) -> Any:
        target: Any = node.target
        if isinstance(target, str):
            return target
        if id(target) not in self._targets:
            self._targets[id(target)] = len(self._names)
            self._names.append(_name_of(target))
        return self._targets[id(target)]

    def _argument(self, value: Any) -> Any:
        """A node as its number, what has no nodes as -1 - its place among the constants."""
        if isinstance(value, fx.Node):
            return self._numbers[value]
        if isinstance(value, tuple | list) and _has_nodes(value):
            return ["t" if isinstance(value, tuple) else "l", *map(self._argument, value)]
        return -1 - self._constants.index(self._plain(value))

    def _value(self, value: Any) -> tuple[int, Any]:
        if value is None:
            return _NOTHING, 0
        if isinstance(value, Value):
            key = (value.shape, value.stride, value.dtype, value.device)
            fixed = all(type(size) is int for size in (*value.shape, *value.stride))
            if not fixed or key not in self._kind_of:
                shape, stride = (
                    [self._plain(size) for size in sizes] for sizes in (value.shape, value.stride)
                )
                index = self._kinds.index([shape, stride, str(value.dtype), str(value.device)])
                if not fixed:
                    return index, value.storage
                self._kind_of[key] = index
            return self._kind_of[key], value.storage
        if isinstance(value, tuple | list):
            return _SEVERAL, [isinstance(value, tuple), *map(self._value, value)]
        raise Unwritable(f"{type(value).__name__} is no value of a node")

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            group = self._step.groups.get(value)
            return value if group is None else {"group": [group.axis, list(group.ranks)]}
        if value is None or type(value) in (bool, int):
            return value
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, tuple | list | set | frozenset):
            kind = next(kind for kind in (tuple, list, set, frozenset) if isinstance(value, kind))
            parts = sorted(value) if kind in (set, frozenset) else value
            return {kind.__name__: [self._plain(part) for part in parts]}
        if isinstance(value, slice):
            return {"slice": [self._plain(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if is_symbolic(value):
            return {"size": written(expression(value))}
        raise Unwritable(f"an argument of the type {type(value).__qualname__}")

    @staticmethod
    def _symbol(symbol: Any) -> str:
        name = written(symbol)
        if not isinstance(name, str):
            raise Unwritable(f"the size {symbol} is no symbol")
        return name


class _Reader:
    """A graph from what `_Writer` gave."""

    def __init__(
        self,
        data: Mapping[str, Any],
        constants: Mapping[str, torch.Tensor],
        groups: Mapping[str, CollectiveGroup],
    ) -> None:
        self._data, self._tensors, self._groups = data, constants, groups
        self._named = {(group.axis, group.ranks): name for name, group in groups.items()}
        self._symbols = SymbolReader([row[0] for row in data["even"]])
        self._nodes: list[fx.Node] = []
        self._constants: list[Any] = []

    def step(self) -> StepGraph:
        data = self._data
        self._constants = [self._constant(row) for row in data["constants"]]
        kinds: list[Kind] = [
            (
                tuple(map(self._constant, shape)),
                tuple(map(self._constant, stride)),
                _of_torch(dtype.removeprefix("torch.")),
                torch.device(device),
            )
            for shape, stride, dtype, device in data["kinds"]
        ]
        regions = [
            {"region": Region(layer, number, phase), "module": module, "recomputed": recomputed}
            for layer, number, phase, module, recomputed in data["regions"]
        ]
        targets = [_target_of(name) for name in data["targets"]]
        graph, nodes, argument = fx.Graph(), self._nodes, self._argument
        for op, name, target, args, kwargs, kind, storage, region, further in data["rows"]:
            node = append_node(
                graph,
                name,
                _OPS[op],
                target if isinstance(target, str) else targets[target],
                tuple([nodes[one] if type(one) is int and one >= 0 else argument(one) for one in args]),
                {key: argument(one) for key, one in kwargs},
            )
            if node.name != name:
                raise Unreadable(f"the name {name} is there twice")
            meta = dict(regions[region]) if region >= 0 else {}
            if kind >= 0:
                shape, stride, dtype, device = kinds[kind]
                meta["value"] = Value(shape, stride, dtype, device, storage)
            elif kind != _ABSENT:
                meta["value"] = _value_of(kind, storage, kinds)
            for key, value in further:
                meta[key] = self._constant(value)
            set_meta(node, meta)
            nodes.append(node)
        symbol = self._symbols.expression
        storages = [
            Storage(index, self._constant(size), torch.device(device), name)
            for index, size, device, name in data["storages"]
        ]
        return StepGraph(
            graph,
            [Input(name, kind) for name, kind in data["inputs"]],
            list(data["outputs"]),
            storages,
            dict(self._tensors),
            {int(storage): name for storage, name in data["gradients"]},
            {symbol(name): nodes[number] for name, number in data["sizes"]},
            {symbol(name): Even(*row) for name, *row in data["even"]},
            groups=dict(self._groups),
        )

    def _argument(self, one: Any) -> Any:
        if isinstance(one, int):
            return self._nodes[one] if one >= 0 else self._constants[-1 - one]
        parts = [self._argument(part) for part in one[1:]]
        return tuple(parts) if one[0] == "t" else parts

    def _constant(self, row: Any) -> Any:
        if not isinstance(row, dict):
            return row
        ((kind, content),) = row.items()
        return self._KINDS[kind](self, content)

    _KINDS: Mapping[str, Callable[[_Reader, Any], Any]] = {
        "group": lambda self, row: self._named[row[0], tuple(row[1])],
        "float": lambda self, row: float.fromhex(row),
        "tuple": lambda self, row: tuple(map(self._constant, row)),
        "list": lambda self, row: list(map(self._constant, row)),
        "set": lambda self, row: set(map(self._constant, row)),
        "frozenset": lambda self, row: frozenset(map(self._constant, row)),
        "slice": lambda self, row: slice(*map(self._constant, row)),
        "device": lambda self, row: torch.device(row),
        "torch": lambda self, row: _of_torch(row),
        "size": lambda self, row: self._symbols.number(row),
    }


def _has_nodes(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_nodes, value))
    return isinstance(value, fx.Node)


def _value_of(kind: int, content: Any, kinds: Sequence[Kind]) -> Any:
    if kind >= 0:
        shape, stride, dtype, device = kinds[kind]
        return Value(shape, stride, dtype, device, content)
    if kind == _NOTHING:
        return None
    parts = [_value_of(inner, held, kinds) for inner, held in content[1:]]
    return tuple(parts) if content[0] else parts


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and _target_of(f"torch.ops.{target}") is target:
        return f"torch.ops.{target}"
    for name, known in _FUNCTIONS.items():
        if known is target:
            return name
    raise Unwritable(f"{target} is no operator of a library")


def _target_of(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    _, _, namespace, operator_name, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise Unreadable(f"{name} is no operator here")
    return found


def _of_torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _NAMED):
        raise Unreadable(f"torch.{name} is no dtype, layout or memory format")
    return found
