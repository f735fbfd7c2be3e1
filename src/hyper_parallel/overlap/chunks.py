"""A collective and the matrix products beside it in K pieces, so that one piece is sent while another one is computed.

Of rows that are gathered, by rows: rank w of W gives x_w = [x_w1; …; x_wK], and piece j gathers all x_wj. A row of a
product depends on that row alone, so that the products of piece j need no other piece. Gathering piece after piece
brings rows in the order (j, w), and the result has them in the order (w, j): pieces are joined along the second dim.

    y = gather(x) · B        y[w, j] = (gather(x_j) · B)[w]                                     `_Gathers`

Of products that are summed over ranks, or whose rows travel, by columns, which touches no row's place:

    z = send(f(a · B))       z[:, j] = send(f(a · B[:, j]))     f: sums, reshapes, rows chosen   `_Sends`

A column of B is a view, and only what was received is joined. Rows that travel to experts are sent back so, in whatever
numbers the data say; on their way there no product waits for part of the columns, and they go in one piece.

Every element is the same sum of the same products in both. Equal bits are up to the kernel: one that picks another
order of summing for another number of rows or columns rounds differently. Gradients of weights are sums over rows: they
take the rows joined, and stay as they are. Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from hyper_parallel.graph import StepGraph, Storage, Value, values_of
from hyper_parallel.graph.effects import writes
from hyper_parallel.graph.groups import group_of, is_collective, is_wait
from hyper_parallel.graph.lifetimes import of_weights
from hyper_parallel.graph.passes import SCHEDULE
from hyper_parallel.graph.recompute import moved_meta
from hyper_parallel.graph.trim import has_effect

Kind = Literal["gather", "reduce", "travel"]
"""Rows gathered for products; products summed over ranks; experts' products whose rows travel back."""
KINDS: tuple[Kind, ...] = ("gather", "reduce", "travel")

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
_GATHER = _functional.all_gather_into_tensor.default
_SENDS: dict[Any, Kind] = {
    _functional.reduce_scatter_tensor.default: "reduce",
    _functional.all_reduce.default: "reduce",
    _functional.all_to_all_single.default: "travel",
}
_ROWS_AT: dict[Any, int] = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Products whose rows are those of one operand, and where that stands."""
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.alias.default})


@dataclass(frozen=True)
class Pieces:
    """Into how many pieces each kind of collective goes; 1 leaves a kind as it is."""

    gather: int = 1
    reduce: int = 1
    travel: int = 1

    def of(self, kind: Kind) -> int:
        """Pieces of a kind."""
        return {"gather": self.gather, "reduce": self.reduce, "travel": self.travel}[kind]

    def __str__(self) -> str:
        words = {"gather": "gathers", "reduce": "sums", "travel": "ways back from experts"}
        return ", ".join(f"{words[kind]} in {self.of(kind)}" for kind in KINDS if self.of(kind) > 1)


WHOLE = Pieces()


@dataclass(frozen=True)
class Chunks:
    """The pass. What is computed again belongs to the backward pass."""

    forward: Pieces = WHOLE
    backward: Pieces = WHOLE

    name: str = "chunks"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"chunks"})
    conflicts: frozenset[str] = frozenset({SCHEDULE, "chunks"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The graph with collectives in pieces; what does not divide by their number stays whole."""
        made, _ = step.copied()
        writer = _Writer(made)
        for found in patterns(made):
            count = self._count(found)
            if count > 1 and found.divides(count):
                found.make(writer, count)
        writer.finish()
        return made

    def _count(self, found: _Change) -> int:
        pieces = {"forward": self.forward, "backward": self.backward}.get(found.begin.meta["phase"], WHOLE)
        return pieces.of(found.kind)

    def __str__(self) -> str:
        passes = (("forward", self.forward), ("backward", self.backward))
        return "; ".join(f"{word} {pieces}" for word, pieces in passes if pieces != WHOLE)


NO_CHUNKS = Chunks()


def patterns(step: StepGraph) -> list[_Change]:
    """What may go in pieces, in order of the collectives."""
    nodes = list(step.nodes)
    weights = of_weights(step, nodes)
    # What is written to in place, or looked at from outside, keeps its place in memory.
    kept = {storage for node in nodes if not is_wait(node) for storage in writes(node)}
    kept |= {value.storage for node in step.output.all_input_nodes for value in values_of(node)}
    kept |= step.gradients.keys()
    found: list[_Change] = []
    taken: set[fx.Node] = set()
    for node in nodes:
        if not is_collective(node) or any(value.storage in weights for value in values_of(node)):
            continue
        change: _Change | None = None
        if node.target is _GATHER:
            change = _gathers(step, node, kept)
        elif node.target in _SENDS:
            change = _sends(node, kept)
        if change is None or not taken.isdisjoint(change.replaced):
            continue
        taken.update(change.replaced)
        found.append(change)
    return found


@dataclass(frozen=True)
class _Gathers:
    """Rows gathered, and the products of them."""

    begin: fx.Node
    wait: fx.Node
    products: tuple[fx.Node, ...]
    joined: bool
    """Whether something else needs the gathered rows too."""
    ranks: int
    kind: Kind = "gather"

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """Nodes that leave the graph."""
        return (self.begin, *self.products)

    def divides(self, count: int) -> bool:
        """Whether each rank's rows go in so many pieces."""
        return self._rows % count == 0

    @property
    def _rows(self) -> int:
        return int(_value(self.begin).shape[0]) // self.ranks

    def make(self, writer: _Writer, count: int) -> None:
        """Put the pieces in its place."""
        source = self.begin.args[0]
        assert isinstance(source, fx.Node)
        rows = self._rows // count
        width = _value(source).shape[1]
        shape = (rows, width)
        pieces = []
        for at in range(count):
            with writer.at(self.begin):
                piece = writer.view(
                    _aten.slice.Tensor,
                    (source, 0, at * rows, (at + 1) * rows),
                    shape,
                    _value(source).stride,
                    source,
                )
                begun = writer.new(_GATHER, (piece, *self.begin.args[1:]), (rows * self.ranks, width))
                begun.meta["chunk"] = (self.begin.name, at)
                pieces.append(writer.waited(self.wait, begun))
        for product in self.products:
            place = _ROWS_AT[product.target]
            with writer.at(product):
                made = []
                for piece in pieces:
                    columns = _value(product).shape[1]
                    args = (*product.args[:place], piece, *product.args[place + 1 :])
                    made.append(
                        writer.new(product.target, args, (rows * self.ranks, columns), product.kwargs)
                    )
                writer.replaced(product, self._in_order(writer, made))
        if self.joined:
            with writer.at(self.wait):
                writer.replaced(self.wait, self._in_order(writer, pieces))
        writer.unused(self.wait)

    def _in_order(self, writer: _Writer, pieces: Sequence[fx.Node]) -> fx.Node:
        """Rows of pieces, (piece, rank), in the order of the whole, (rank, piece)."""
        parts = []
        for piece in pieces:
            rows, columns = _value(piece).shape
            shape: tuple[Any, ...] = (self.ranks, rows // self.ranks, columns)
            parts.append(
                writer.view(_aten.view.default, (piece, list(shape)), shape, _contiguous(shape), piece)
            )
        (_, rows, columns) = _value(parts[0]).shape
        whole = writer.new(_aten.cat.default, (parts, 1), (self.ranks, rows * len(parts), columns))
        shape = (self.ranks * rows * len(parts), columns)
        return writer.view(_aten.view.default, (whole, list(shape)), shape, _contiguous(shape), whole)


@dataclass(frozen=True)
class _Sends:
    """Products, what is made of them, and the collective that it is sent by."""

    begin: fx.Node
    wait: fx.Node
    tree: tuple[fx.Node, ...]
    """What is computed for the collective and nothing else, products included, in order."""
    kind: Kind

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """Nodes that leave the graph."""
        return (*self.tree, self.begin)

    def divides(self, count: int) -> bool:
        """Whether the columns go in so many pieces."""
        return int(_value(self.begin).shape[-1]) % count == 0

    def make(self, writer: _Writer, count: int) -> None:
        """Put the pieces in its place."""
        columns = int(_value(self.begin).shape[-1]) // count
        received = []
        for at in range(count):
            made: dict[fx.Node, fx.Node] = {}
            for node in self.tree:
                with writer.at(self.begin, node):
                    made[node] = self._piece(writer, node, made, at * columns, columns)
            with writer.at(self.begin):
                given = self.begin.args[0]
                assert isinstance(given, fx.Node)
                shape = (*_value(self.begin).shape[:-1], columns)
                begun = writer.new(self.begin.target, (made[given], *self.begin.args[1:]), shape)
                begun.meta["chunk"] = (self.begin.name, at)
                received.append(writer.waited(self.wait, begun))
        with writer.at(self.wait):
            writer.replaced(self.wait, writer.new(_aten.cat.default, (received, -1), _value(self.wait).shape))
        writer.unused(self.wait)

    @staticmethod
    def _piece(
        writer: _Writer, node: fx.Node, made: dict[fx.Node, fx.Node], start: int, columns: int
    ) -> fx.Node:
        """Some columns of what a node of the tree gives."""
        shape = (*_value(node).shape[:-1], columns)
        args: list[Any] = [made.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if _is_product(node):
            factor = node.args[1]
            assert isinstance(factor, fx.Node)
            value = _value(factor)
            dim = len(value.shape) - 1
            args[1] = writer.view(
                _aten.slice.Tensor,
                (factor, dim, start, start + columns),
                (*value.shape[:-1], columns),
                value.stride,
                factor,
            )
        elif node.target in _RESHAPES:
            (given,) = (made[arg] for arg in node.all_input_nodes if arg in made)
            if len(args) > 1:
                args[1] = [*args[1][:-1], columns]
            return writer.view(node.target, tuple(args), shape, _contiguous(shape), given)
        return writer.new(node.target, tuple(args), shape, node.kwargs)


_Change = _Gathers | _Sends


def _gathers(step: StepGraph, begin: fx.Node, kept: set[int]) -> _Gathers | None:
    """The products of rows that a collective gathers; None where there are none."""
    wait, source = _only_wait(begin), begin.args[0]
    if wait is None or not isinstance(source, fx.Node) or not _plain(begin, 2) or not _plain(source, 2):
        return None
    products: list[fx.Node] = []
    joined = False
    pending = [wait]
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user.target in _RESHAPES:
                pending.append(user)
            elif (
                user.target in _ROWS_AT
                and user.args[_ROWS_AT[user.target]] is node
                and user.all_input_nodes.count(node) == 1
                and _value(node).shape == _value(begin).shape
                and _plain(user, 2)
                and (user.target is _aten.mm.default or len(_value(user.args[0]).shape) == 1)
                and _value(user).storage not in kept
            ):
                products.append(user)
            else:
                joined = True
    if not products or _value(begin).storage in kept:
        return None
    return _Gathers(begin, wait, tuple(products), joined, len(group_of(step, begin).ranks))


def _sends(begin: fx.Node, kept: set[int]) -> _Sends | None:
    """What is computed for a collective alone, back to the products that it begins with; None where there are none."""
    wait = _only_wait(begin)
    if wait is None or not _plain(begin) or _value(begin).storage in kept:
        return None
    found: list[fx.Node] = []
    pending: list[Any] = [begin.args[0]]
    while pending:
        node = pending.pop()
        if node in found:
            return None
        if (
            not isinstance(node, fx.Node)
            or len(node.users) != 1
            or not _plain(node)
            or _value(node).storage in kept
        ):
            return None
        sources = _sources(node)
        if sources is None:
            return None
        found.append(node)
        pending += sources
    return _Sends(begin, wait, tuple(reversed(found)), _SENDS[begin.target])


def _sources(node: fx.Node) -> list[Any] | None:
    """What the columns of a node's result come from, column by column; None where they do not."""
    if _is_product(node):
        return []
    if node.target is _aten.add.Tensor and not node.kwargs:
        shapes = [_value(arg).shape for arg in node.args if isinstance(arg, fx.Node)]
        same = len(shapes) == 2 and all(
            _same(shape, _value(node).shape) and _plain(arg)
            for shape, arg in zip(shapes, node.all_input_nodes, strict=False)
        )
        return list(node.args) if same and node.args[0] is not node.args[1] else None
    if node.target in _RESHAPES:
        source = node.all_input_nodes[0]
        return [source] if _same(_value(source).shape[-1:], _value(node).shape[-1:]) else None
    if node.target is _aten.index.Tensor:
        rows, places = node.args
        by_rows = isinstance(places, list | tuple) and len(places) == 1 and isinstance(places[0], fx.Node)
        return [rows] if by_rows and len(_value(rows).shape) == 2 else None
    return None


def _is_product(node: fx.Node) -> bool:
    """Whether its columns are those of its second operand."""
    if node.target is _aten.mm.default:
        return True
    grouped = str(node.target).endswith("grouped_mm.default")
    shapes = [_value(arg).shape for arg in node.args[:2] if isinstance(arg, fx.Node)]
    return grouped and [len(shape) for shape in shapes] == [2, 3]


def _functional_call(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node)


def _only_wait(begin: fx.Node) -> fx.Node | None:
    users = list(begin.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def _plain(node: fx.Node, dims: int | None = None) -> bool:
    """Whether a node gives one contiguous tensor, of a number of columns that is known."""
    value = node.meta.get("value")
    if not isinstance(value, Value) or not value.shape or not isinstance(value.shape[-1], int):
        return False
    if dims is not None and (
        len(value.shape) != dims or not all(isinstance(size, int) for size in value.shape)
    ):
        return False
    wanted = _contiguous(value.shape)
    return all(
        str(size) == "1" or str(stride) == str(want)
        for size, stride, want in zip(value.shape, value.stride, wanted, strict=True)
    )


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes are equal; sizes that the data decide by their expressions, which asks the data nothing."""
    return len(one) == len(other) and all(str(a) == str(b) for a, b in zip(one, other, strict=True))


def _contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def _value(node: Any) -> Value:
    value = node.meta["value"]
    assert isinstance(value, Value), f"{node} gives one tensor"
    return value


class _Writer:
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
        value = _value(self._like)
        storage = Storage(len(self._step.storages), 0, value.device)
        made = Value(tuple(shape), _contiguous(shape), value.dtype, value.device, storage.index)
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
        return self._node(target, args, replace(_value(source), shape=tuple(shape), stride=tuple(stride)))

    def waited(self, wait: fx.Node, begun: fx.Node) -> fx.Node:
        """The wait for a collective."""
        return self._node(wait.target, (begun,), _value(begun))

    def replaced(self, node: fx.Node, instead: fx.Node) -> None:
        """Whoever used `node` uses `instead`."""
        self._moved[_value(node).storage] = _value(instead).storage
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
            if node.users or node in gone or (has_effect(node) and not _functional_call(node)):
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
        node.meta = {key: like[key] for key in ("phase", "module", "recomputed")}
        node.meta.update(value=value, origin=like.get("origin", self._like.name))
        return node
