"""Likeness: of graphs, node by node (`difference`); of layers, as modules and as nodes, and their period."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hyper_parallel.compat.fx_graph import expression, is_symbolic
from hyper_parallel.graph.ir import Size, StepGraph, Value, values_of


def difference(one: StepGraph, other: StepGraph) -> str | None:
    """The first thing in which two graphs differ, in words; None where they are the same.

    Same are operators, their order and arguments, values with their shapes, strides and storages, sizes of storages,
    regions, modules, inputs, outputs, gradients, data-dependent sizes and constants.
    """
    return _Comparison(one, other).result()


class SymbolPairs:
    """Which symbol of one graph, or of one part of it, stands for which of another, and what is the same by them."""

    def __init__(self) -> None:
        self.symbols: dict[Any, Any] = {}

    def same_size(self, a: Size, b: Size) -> bool:
        """Whether sizes are the same; symbols that are met for the first time become a pair."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        if not (is_symbolic(a) and is_symbolic(b)):
            return False
        mine, its = expression(a), expression(b)
        if mine.is_Symbol and its.is_Symbol:
            return bool(self.symbols.setdefault(mine, its) == its)
        return bool(mine.xreplace(self.symbols) == its)

    def same_value(self, a: Value, b: Value) -> bool:
        """Whether values are the same but for their storages."""
        return (
            (a.dtype, a.device, len(a.shape)) == (b.dtype, b.device, len(b.shape))
            and all(map(self.same_size, a.shape, b.shape))
            and all(map(self.same_size, a.stride, b.stride))
        )


class _Unequal(Exception):
    """The graphs differ."""


class _Comparison:
    def __init__(self, one: StepGraph, other: StepGraph) -> None:
        self._one, self._other = one, other
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, int] = {}
        self._pairs = SymbolPairs()
        self._parts: dict[int, int] = {}

    def result(self) -> str | None:
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
            if not self._pairs.same_size(mine.bytes, its.bytes) or (mine.device, mine.name) != (
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
            self._pairs.symbols[symbol] = by_node[self._nodes[node]]
        _equal(len(self._one.sizes), len(self._other.sizes), "numbers of sizes")

    def _even(self) -> None:
        one = {self._pairs.symbols.get(symbol): even for symbol, even in self._one.even.items()}
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
            return (
                isinstance(b, Value)
                and self._storages.setdefault(a.storage, b.storage) == b.storage
                and self._pairs.same_value(a, b)
            )
        if isinstance(a, tuple | list):
            return (
                isinstance(b, tuple | list)
                and len(a) == len(b)
                and all(self._same(x, y) for x, y in zip(a, b, strict=True))
            )
        if isinstance(a, Mapping):
            return a.keys() == b.keys() and all(self._same(a[key], b[key]) for key in a)
        return same_number(a, b)


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


# Likeness of layers: which do the same up to their values, and the period in which kinds of layers follow each other.
#
# Before capture layers are modules, and alike if their code, settings, shapes and placement are (`kinds`). After it
# they are nodes, and alike if their operators, arguments, shapes and dtypes are (`likeness`).
#
#     layers        0 | 1 2 | 3 4 | … | 75 76 | 77        before = 1, length = 2, repeats = 38
#     captured      0 | 1 2 | 3 4 | 5 6 | 73 74 | 75 76 | 77        5 periods; that in the middle stands for the others

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_TENSORS = ("_parameters", "_buffers", "_modules")
_OF_GENERATION = "generation_config"
"""An attribute of Transformers' models that no step uses. It holds a hash that each process computes anew."""
_HOOKS = ("_forward", "_backward", "_state_dict", "_load_state_dict")
"""How attributes of every nn.Module begin whose keys are numbers that are never given twice."""
_NO_HOOKS = "builtins.list[]"
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")

# Layers as modules.


def described(module: nn.Module, modules: set[str] | None = None) -> dict[str, str]:
    """What a module computes, up to its values: classes, attributes, parameters and buffers of all its parts. To
    `modules` are added the names of the Python modules that attributes have their code of.

    A function that is not found under its name in its module, such as a lambda, is told by its code and what it closes
    over. Another object that is neither plain, nor a container or an object of such, nor found under its name, is told
    by its identity: only what shares it is alike.
    """
    found: dict[str, str] = {}
    modules = set() if modules is None else modules
    # Of objects that many parts hold, such as a config.
    shared: dict[int, str] = {}
    for path, part in module.named_modules():
        found[f"{path}:class"] = f"{type(part).__module__}.{type(part).__qualname__}"
        for key, value in vars(part).items():
            if key in _TENSORS or key == _OF_GENERATION:
                continue
            if isinstance(value, _PLAIN):
                found[f"{path}:{key}"] = repr(value)
            elif key.startswith(_HOOKS) and isinstance(value, dict):
                found[f"{path}:{key}"] = (
                    _attribute(list(value.values()), set(), modules) if value else _NO_HOOKS
                )
            else:
                if id(value) not in shared:
                    shared[id(value)] = _attribute(value, set(), modules)
                found[f"{path}:{key}"] = shared[id(value)]
        for own, p in part._parameters.items():
            if p is not None:
                found[f"{path}:{own}"] = f"{tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for own, buffer in part._buffers.items():
            if buffer is not None:
                found[f"{path}:{own}"] = f"{tuple(buffer.shape)} {buffer.dtype} {buffer.device}"
    return found


def _attribute(value: Any, inside: set[int], modules: set[str]) -> str:
    """The description of an attribute; `inside`: the objects that it is part of; `modules`: as of `described`."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in inside:
        return "itself"
    inside = inside | {id(value)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    coded = value if isinstance(value, type | types.FunctionType) else type(value)
    modules.add(coded.__module__ or "")
    if isinstance(value, Mapping):
        parts = [
            (_attribute(key, inside, modules), _attribute(one, inside, modules)) for key, one in value.items()
        ]
        return f"{kind}{parts}"
    if isinstance(value, tuple | list):
        return f"{kind}{[_attribute(one, inside, modules) for one in value]}"
    if isinstance(value, set | frozenset):
        return f"{kind}{sorted(_attribute(one, inside, modules) for one in value)}"
    if isinstance(value, functools.partial):
        return f"{kind}{_attribute([value.func, value.args, value.keywords], inside, modules)}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and _is_found_by_name(value):
        return f"{kind} {value.__module__}.{value.__name__}"
    if isinstance(value, types.FunctionType):
        given = [
            value.__defaults__,
            value.__kwdefaults__,
            [_content(cell) for cell in value.__closure__ or ()],
            vars(value),
        ]
        return f"{kind} {value.__module__} {_code(value.__code__)} {_attribute(given, inside, modules)}"
    own = getattr(value, "__dict__", None)
    if isinstance(value, type | torch.Tensor | nn.Module) or not own:
        return f"{kind} {id(value)}"
    return f"{kind}{_attribute(own, inside, modules)}"


def _code(code: types.CodeType) -> str:
    """The description of code, wherever it is written."""
    constants = [_constant(one) for one in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    takes = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {takes} {constants}"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that is not bound yet
        return None


def _is_found_by_name(value: Any) -> bool:
    """Whether a function or a class is what its module has under its name, in every process that imports it."""
    module = sys.modules.get(value.__module__ or "")
    return module is not None and getattr(module, value.__name__, None) is value


def signature(module: nn.Module, modules: set[str] | None = None) -> str:
    """A digest of what a module computes, up to its values. `modules`: as of `described`."""
    return hashlib.sha256(repr(sorted(described(module, modules).items())).encode()).hexdigest()


def kinds(
    layers: Iterable[nn.Module], more: Callable[[int], Mapping[str, str]] = lambda index: {}
) -> list[list[int]]:
    """The indices of the layers by kind, in order of each kind's first layer.

    `more`: what else layers of one kind share, by index, such as their placement. A setting that is each layer's own
    index, in every layer that has it, tells no kinds apart (`own_index`); nor do names of modules of the layer.
    """
    facts = [{**_facts(layer, index), **more(index)} for index, layer in enumerate(layers)]
    telling = _telling(facts)
    found: dict[Hashable, list[int]] = {}
    for index, one in enumerate(facts):
        found.setdefault(frozenset((k, v) for k, v in one.items() if k in telling), []).append(index)
    return list(found.values())


def own_index(layers: Sequence[nn.Module]) -> list[dict[str, list[str]]]:
    """Of each layer, by the names of the modules in it, the attributes that are the layer's own index, in every layer
    that has them."""
    facts = [_facts(layer, index) for index, layer in enumerate(layers)]
    telling = _telling(facts)
    found: list[dict[str, list[str]]] = []
    for one in facts:
        attributes: dict[str, list[str]] = {}
        for key in one.keys() - telling:
            path, _, name = key.rpartition(":")
            attributes.setdefault(path, []).append(name)
        found.append(attributes)
    return found


def _facts(layer: nn.Module, index: int) -> dict[str, str]:
    """Facts of a layer's computation; in names of modules such as ``model.layers.3.mlp`` without the layer's own
    index."""
    name = re.compile(rf"(?<=[a-z_]\.){index}(?=\.[a-z_])")
    return {key: name.sub("*", value) for key, value in described(layer).items()}


def _telling(facts: Iterable[Mapping[str, str]]) -> set[str]:
    """The attributes that are not each layer's own index."""
    return {key for index, one in enumerate(facts) for key, value in one.items() if value != repr(index)}


# Periods.


@dataclass(frozen=True)
class Period:
    """Layers with a period that repeats, some in front of it and some behind it, and those that are captured.

    Of the periods as many are captured at either end, where a layer may differ in how it hands on what it computed, and
    between them one that stands for all others.
    """

    total: int
    """Layers of the model."""
    before: int
    """Layers in front of the first period."""
    length: int
    """Layers of a period."""
    repeats: int
    """How often the period comes in the model."""
    captured: int
    """Periods that are captured, at most `repeats`."""

    @property
    def behind(self) -> int:
        """The first layer behind the last period."""
        return self.before + self.length * self.repeats

    @property
    def middle(self) -> int:
        """The captured period that stands for others."""
        return self.captured // 2

    @property
    def copies(self) -> int:
        """How often the middle period comes in the model."""
        return self.repeats - self.captured + 1

    @property
    def layers(self) -> list[int]:
        """The indices in the model of the layers that are captured."""
        first = self.before + (self.middle + 1) * self.length
        last = self.behind - (self.captured - self.middle - 1) * self.length
        return [*range(first), *range(last, self.total)]

    def block(self, layer: int) -> int | None:
        """The captured period that a layer is in, by its place among those captured; None outside of periods."""
        at = (layer - self.before) // self.length
        return at if 0 <= at < self.captured else None

    def real(self, layer: int, copy: int) -> int:
        """The model's index of a layer, by its place among those captured, in a copy of the middle period."""
        at = (layer - self.before) // self.length
        if at < self.middle:
            return layer
        return layer + (copy if at == self.middle else self.copies - 1) * self.length


def find_period(found: Sequence[Sequence[int]], captured: int) -> Period | None:
    """The period to capture so often, given the indices of each kind's layers: that with the fewest captured layers;
    None where none comes more often."""
    kind = {layer: kind for kind, layers in enumerate(found) for layer in layers}
    sequence = [kind[layer] for layer in sorted(kind)]
    best: Period | None = None
    for length in range(1, len(sequence) // (captured + 1) + 1):
        for before in range(len(sequence)):
            stop = before + length
            while stop < len(sequence) and sequence[stop] == sequence[stop - length]:
                stop += 1
            one = Period(len(sequence), before, length, (stop - before) // length, captured)
            if one.copies > 1 and (best is None or len(one.layers) < len(best.layers)):
                best = one
    return best


# Layers as nodes.


def likeness(nodes: Iterable[fx.Node]) -> Hashable:
    """What is equal for runs of nodes that do the same: operators, arguments and tensors, whatever they are called and
    wherever in a step they are.

    Nodes, storages and symbols of sizes count by their first places in the run.
    """
    places: dict[object, int] = {}

    def place(of: object) -> int:
        return places.setdefault(of, len(places))

    def size(one: Size) -> Hashable:
        return one if isinstance(one, int) else _SYMBOL.sub(lambda found: f"%{place(found[0])}", str(one))

    def kind(value: Value) -> Hashable:
        return (*map(size, value.shape), *map(size, value.stride), value.dtype, value.device)

    def seen(node: fx.Node) -> Hashable:
        return place(node), tuple((kind(value), place(value.storage)) for value in values_of(node))

    def argument(arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return seen(arg)
        if isinstance(arg, tuple | list):
            return tuple(map(argument, arg))
        if isinstance(arg, Mapping):
            return tuple((key, argument(value)) for key, value in arg.items())
        # 1, 1.0 and True are equal, and not the same.
        return type(arg), arg

    return tuple((node.target, argument(node.args), argument(node.kwargs), seen(node)) for node in nodes)
