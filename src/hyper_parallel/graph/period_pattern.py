"""Two neighbouring periods of layers: what each of their nodes refers to (`pattern_of`), and values inferred again.

A node whose arguments have other shapes than when it was captured is given its value by the fake kernels (`inferred`).
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from hyper_parallel.compat.fake_tensors import fake_kernel, fake_mode
from hyper_parallel.graph.ir import Size, StepGraph, Value, flat_values, mapped_value, values_of
from hyper_parallel.graph.likeness import SymbolPairs, label, same_number
from hyper_parallel.graph.step_context import Region, region_of


def inferred(node: fx.Node, value: Any) -> tuple[Any, dict[int, Size]]:
    """(the node's value, the bytes of each storage that has another size), by the values of its arguments.

    `value`: what it gave for the arguments that it was captured with, where it lies now. Raises Unlike where the node
    gives another number of tensors, or has sizes that depend on the data.
    """
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        found = source.meta["value"][index]
        return Value(found.shape, found.stride, value.dtype, value.device, value.storage), {}
    kernel: Any = fake_kernel(node.target) or node.target
    with fake_mode():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _fake)
        result = kernel(*args, **kwargs)
    tensors = [
        one
        for one in (result if isinstance(result, tuple | list) else [result])
        if isinstance(one, torch.Tensor)
    ]
    values = flat_values(value)
    if len(tensors) != len(values):
        raise Unlike(f"{label(node)} gives {len(values)} tensors, and {len(tensors)} of more layers")
    # What lies in memory of an argument lies there still.
    lent = {one.storage for source in node.all_input_nodes for one in values_of(source)}
    sizes: dict[int, Size] = {}
    symbols = []
    for one, tensor in zip(values, tensors, strict=True):
        symbols.append(Value(tuple(tensor.shape), tensor.stride(), one.dtype, one.device, one.storage))
        if one.storage not in lent:
            sizes[one.storage] = tensor.untyped_storage().nbytes()
    remaining = iter(symbols)
    return mapped_value(value, lambda _: next(remaining)), sizes


def _fake(node: fx.Node) -> torch.Tensor:
    value: Any = node.meta.get("value")
    sizes = (*value.shape, *value.stride) if isinstance(value, Value) else (None,)
    if not all(isinstance(size, int) for size in sizes):
        raise Unlike(f"the shape of {label(node)} cannot be inferred again")
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)


# Two neighbouring periods of layers in a captured graph, and what each of their nodes refers to.
#
# Let A and B be the periods, `a_i` and `b_i` their i-th nodes. What `a_i` and `b_i` have at the same place of their
# arguments is one of
#
#     own        a_j and b_j                         the period's own node
#     same       one node for both                   outside of both, or in A
#     previous   any node x, and a_j                 the node of the period in front
#     next       b_j, and any node y                 the node of the period behind
#
# and the same holds for the storages in which their values lie, and for sizes that depend on the data. Numbers in the
# arguments are equal, count the periods (v in A, v + s in B and v + k·s in the k-th period behind A), or are made of
# the name of the node's module. Any other pair is `Unlike`: what lies between A and B would have to be guessed.

Which = Literal["a", "b"]


class Unlike(Exception):
    """The periods are not alike, so that none can be written between them."""


@dataclass(frozen=True)
class Pair:
    """Two captured periods that stand beside each other in a graph, by the layers' indices in the model."""

    prefix: str
    """The name of the list of layers."""
    length: int
    """Layers of a period."""
    a: int
    """The first layer of A."""
    b: int
    """The first layer of B, behind A."""

    def which(self, layer: str) -> Which | None:
        """The period that a layer is in, by its name."""
        start, _, index = layer.rpartition(".")
        if start != self.prefix or not index.isdigit():
            return None
        if 0 <= int(index) - self.a < self.length:
            return "a"
        return "b" if 0 <= int(index) - self.b < self.length else None


class Renamer:
    """Names in A to those of the period whose first layer has another index."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._index = re.compile(rf"(?<![^.]){re.escape(pair.prefix)}\.(\d+)(?![^.])")
        self._names: dict[tuple[str, int], str] = {}
        self._regions: dict[tuple[Region, int], Region] = {}

    def name(self, name: str, first: int) -> str:
        """A name with the indices of A's layers exchanged for those of the period that begins with layer `first`."""
        known = self._names.get((name, first))
        if known is None:
            known = self._names[name, first] = self._index.sub(
                lambda found: f"{self._pair.prefix}.{self._moved(int(found[1]), first)}", name
            )
        return known

    def _moved(self, index: int, first: int) -> int:
        inside = 0 <= index - self._pair.a < self._pair.length
        return index - self._pair.a + first if inside else index

    def region(self, region: Region, first: int) -> Region:
        known = self._regions.get((region, first))
        if known is None:
            known = self._regions[region, first] = replace(region, layer=self.name(region.layer, first))
        return known


@dataclass(frozen=True)
class Own:
    """The node or storage of this number in the period itself."""

    at: Any


@dataclass(frozen=True)
class Same:
    """One for all periods."""

    what: Any


@dataclass(frozen=True)
class Previous:
    """The reference of the period in front; A has `first`."""

    at: Any
    first: Any


@dataclass(frozen=True)
class Next:
    """The reference of the period behind; B has `last`."""

    at: Any
    last: Any


@dataclass(frozen=True)
class Counted:
    """A number that is larger by `step` in each period than in the one in front."""

    start: int
    step: int


@dataclass(frozen=True)
class Named:
    """The number of this place among those that are made of the name of a module of A."""

    module: str
    at: int


Reference = Own | Same | Previous | Next
Numbers = Callable[[str], Sequence[int]]
"""Numbers that are made of a module's name, in a fixed order."""
Made = tuple[int, int]
"""A storage that a period makes: (the node that has it first, the place among its values)."""


@dataclass
class Pattern:
    """The pattern that A and B have in common."""

    pair: Pair
    a: list[fx.Node]
    """Nodes of A in the graph's order, placeholders and constants among them."""
    b: list[fx.Node]
    place: dict[fx.Node, tuple[Which, int]]
    """Each node of the two to its period and number."""
    arguments: list[tuple[Any, Any]] = field(default_factory=list)
    """Of each number, args and kwargs with a Reference for each node."""
    storages: dict[int, Reference] = field(default_factory=dict)
    """Of each storage that A's values lie in; what `Own`, `Previous` and `Next` have is a `Made`."""
    makers: dict[int, tuple[Which, Made]] = field(default_factory=dict)
    """Each storage that A or B makes."""
    pairs: SymbolPairs = field(default_factory=SymbolPairs)
    """Symbols of A's sizes to those of B's."""

    @property
    def own_symbols(self) -> dict[Any, Any]:
        """The symbols that each period has for itself."""
        return {mine: its for mine, its in self.pairs.symbols.items() if mine != its}


def pattern_of(step: StepGraph, pair: Pair, renamer: Renamer, numbers: Numbers) -> Pattern:
    """The pattern of two neighbouring periods. `numbers`: what arguments may have of their modules' names. Raises
    Unlike."""
    nodes: dict[Which, list[fx.Node]] = {"a": [], "b": []}
    place: dict[fx.Node, tuple[Which, int]] = {}
    for node in step.graph.nodes:
        which = pair.which(region_of(node).layer) if node.op != "output" else None
        if which is not None:
            place[node] = (which, len(nodes[which]))
            nodes[which].append(node)
    if not nodes["a"] or len(nodes["a"]) != len(nodes["b"]):
        raise Unlike(f"periods of {len(nodes['a'])} and {len(nodes['b'])} nodes")
    found = Pattern(pair, nodes["a"], nodes["b"], place)
    _Matcher(step, found, renamer, numbers).match()
    return found


class _Matcher:
    def __init__(self, step: StepGraph, pattern: Pattern, renamer: Renamer, numbers: Numbers) -> None:
        self._step, self._pattern, self._renamer, self._numbers = step, pattern, renamer, numbers
        self._inputs = dict(zip(step.placeholders, step.inputs, strict=True))

    def match(self) -> None:
        """Fill the pattern."""
        pattern = self._pattern
        known: set[int] = set()
        for node in self._step.graph.nodes:
            for slot, value in enumerate(values_of(node)):
                if value.storage not in known and node in pattern.place:
                    which, at = pattern.place[node]
                    pattern.makers[value.storage] = which, (at, slot)
                known.add(value.storage)
        self._match_sizes()
        for a, b in zip(pattern.a, pattern.b, strict=True):
            self._match_nodes(a, b)
        for a, b in zip(pattern.a, pattern.b, strict=True):
            self._match_values(a, b)
        self._match_made()

    def _match_sizes(self) -> None:
        by_node = {node: symbol for symbol, node in self._step.sizes.items()}
        for a, b in zip(self._pattern.a, self._pattern.b, strict=True):
            if (a in by_node) != (b in by_node):
                raise Unlike(f"{label(a)} and {label(b)}: one of them computes a size")
            if a in by_node:
                self._pattern.pairs.symbols[by_node[a]] = by_node[b]

    def _match_nodes(self, a: fx.Node, b: fx.Node) -> None:
        first = self._pattern.pair.b
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise Unlike(f"{label(a)} stands where {label(b)} does")
        if "writes" in a.meta or "writes" in b.meta:
            raise Unlike(f"{label(a)} writes to what its operator does not say")
        same = (
            self._renamer.region(region_of(a), first) == region_of(b)
            and self._renamer.name(a.meta["module"], first) == b.meta["module"]
            and a.meta["recomputed"] == b.meta["recomputed"]
        )
        if a.op == "placeholder":
            mine, its = self._inputs[a], self._inputs[b]
            same &= (self._renamer.name(mine.name, first), mine.kind) == (its.name, its.kind)
        if a.op == "get_attr":
            one, other = (self._step.constants[str(node.target)] for node in (a, b))
            same &= one.dtype == other.dtype and one.equal(other)
        if not same:
            raise Unlike(f"{label(a)} is not like {label(b)}")
        self._pattern.arguments.append(
            (self._argument(a.args, b.args, (a, b)), self._argument(a.kwargs, b.kwargs, (a, b)))
        )

    def _argument(self, a: Any, b: Any, of: tuple[fx.Node, fx.Node]) -> Any:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._reference(a, b, self._pattern.place.get(a), self._pattern.place.get(b), of)
        if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
            parts = [self._argument(x, y, of) for x, y in zip(a, b, strict=True)]
            return parts if isinstance(a, list) else tuple(parts)
        if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
            return {key: self._argument(a[key], b[key], of) for key in a}
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            raise Unlike(f"{label(of[0])} and {label(of[1])} are given {a} and {b}")
        return a if same_number(a, b) else self._number(a, b, of)

    def _number(self, a: Any, b: Any, of: tuple[fx.Node, fx.Node]) -> Counted | Named:
        """What two numbers that differ are."""
        if type(a) is int and type(b) is int:
            mine, its = (self._numbers(node.meta["module"]) for node in of)
            for at, (x, y) in enumerate(zip(mine, its, strict=True)):
                if (a, b) == (x, y):
                    return Named(of[0].meta["module"], at)
            return Counted(a, b - a)
        raise Unlike(f"{label(of[0])} and {label(of[1])} are given {a} and {b}")

    def _reference(
        self,
        a: Any,
        b: Any,
        mine: tuple[Which, Any] | None,
        its: tuple[Which, Any] | None,
        of: tuple[fx.Node, fx.Node],
    ) -> Reference:
        """What A and B refer to, which are in these periods at these places; None outside of both."""
        if mine is not None and its is not None and (mine[0], its[0]) == ("a", "b") and mine[1] == its[1]:
            return Own(mine[1])
        if a is b or (isinstance(a, int) and a == b):
            return Same(a)
        if its is not None and its[0] == "a" and (mine is None or mine[0] == "a"):
            return Previous(its[1], a)
        if mine is not None and mine[0] == "b" and (its is None or its[0] == "b"):
            return Next(mine[1], b)
        raise Unlike(f"{label(of[0])} and {label(of[1])} refer to {a} and {b}")

    def _match_values(self, a: fx.Node, b: fx.Node) -> None:
        mine, its = flat_values(a.meta.get("value")), flat_values(b.meta.get("value"))
        where = f"{label(a)} and {label(b)}"
        if len(mine) != len(its):
            raise Unlike(f"{where} give {len(mine)} and {len(its)} tensors")
        for x, y in zip(mine, its, strict=True):
            if not self._pattern.pairs.same_value(x, y):
                raise Unlike(f"{where} give {x} and {y}")
            makers = self._pattern.makers
            found = self._reference(
                x.storage, y.storage, makers.get(x.storage), makers.get(y.storage), (a, b)
            )
            if self._pattern.storages.setdefault(x.storage, found) != found:
                raise Unlike(f"{where} lie in storages that are not alike")

    def _match_made(self) -> None:
        """Storages that A and B make have the same size, gradients of the same parameters lie in them, and the sizes
        of the two are expected to be the same."""
        step, pattern, first = self._step, self._pattern, self._pattern.pair.b
        made: dict[Which, dict[Made, int]] = {"a": {}, "b": {}}
        for storage, (which, at) in pattern.makers.items():
            made[which][at] = storage
        if made["a"].keys() != made["b"].keys():
            raise Unlike("the periods make other storages")
        for at, mine in made["a"].items():
            one, other = step.storages[mine], step.storages[made["b"][at]]
            names = [step.gradients.get(index) for index in (mine, made["b"][at])]
            named = None if names[0] is None else self._renamer.name(names[0], first)
            same = pattern.pairs.same_size(one.bytes, other.bytes)
            if one.device != other.device or not same or named != names[1]:
                raise Unlike(f"storage {one} is not like {other}")
        for symbol, its in pattern.own_symbols.items():
            even = [step.even.get(one) for one in (symbol, its)]
            facts = [None if one is None else (one.rows, one.scales, one.most) for one in even]
            if facts[0] != facts[1]:
                raise Unlike(f"{even[0]} is not like {even[1]}")


def beside(places: Sequence[tuple[Which, Any] | None]) -> list[tuple[range, range]]:
    """Stretches of A and of B that stand beside each other and have the same numbers, by their places in a list."""
    runs: list[range] = []
    start = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or _period(places[at]) != _period(places[start]):
            runs.append(range(start, at))
            start = at
    found: list[tuple[range, range]] = []
    taken = 0
    for one, other in itertools.pairwise(runs):
        if {_period(places[one.start]), _period(places[other.start])} != {"a", "b"}:
            continue
        # Where a run is the end of one stretch and the beginning of another, the longest that fits is taken.
        for length in range(min(other.start - max(one.start, taken), len(other)), 0, -1):
            first = range(other.start - length, other.start)
            second = range(other.start, other.start + length)
            if all(places[x][1] == places[y][1] for x, y in zip(first, second, strict=True)):  # type: ignore[index]
                found.append((first, second) if _period(places[first.start]) == "a" else (second, first))
                taken = second.stop
                break
    return found


def _period(place: tuple[Which, Any] | None) -> Which | None:
    return None if place is None else place[0]
