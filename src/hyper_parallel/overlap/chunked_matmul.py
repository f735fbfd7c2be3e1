"""Chunked matrix products: a collective in K chunks, each sent while the next one is computed.

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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.ir import group_of, is_collective, is_wait
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap.node_patterns import (
    RESHAPES,
    StepEditor,
    column_sources,
    contiguous_strides,
    is_contiguous,
    is_product,
    only_wait,
    tensor_value,
)

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


@dataclass(frozen=True)
class Chunked:
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


WHOLE = Chunked()


@dataclass(frozen=True)
class Chunks:
    """The pass. What is computed again belongs to the backward pass."""

    forward: Chunked = WHOLE
    backward: Chunked = WHOLE

    name: str = "chunks"
    provides: frozenset[str] = frozenset({"chunks"})
    conflicts: frozenset[str] = frozenset({SCHEDULE, "chunks"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The graph with collectives in pieces; what does not divide by their number stays whole."""
        copy, _ = step.copied()
        editor = StepEditor(copy)
        for found in patterns(copy):
            count = self._count(found)
            if count > 1 and found.divides(count):
                found.make(editor, count)
        editor.finish()
        return copy

    def _count(self, found: _Change) -> int:
        pieces = {"forward": self.forward, "backward": self.backward}.get(region_of(found.begin).phase, WHOLE)
        return pieces.of(found.kind)

    def __str__(self) -> str:
        passes = (("forward", self.forward), ("backward", self.backward))
        return "; ".join(f"{word} {pieces}" for word, pieces in passes if pieces != WHOLE)


NO_CHUNKS = Chunks()


def patterns(step: StepGraph) -> list[_Change]:
    """The patterns that may be cut into chunks, in order of the collectives."""
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
        return (self.begin, *self.products)

    def divides(self, count: int) -> bool:
        """Whether each rank's rows divide into this number of chunks."""
        return self._rows % count == 0

    @property
    def _rows(self) -> int:
        return int(tensor_value(self.begin).shape[0]) // self.ranks

    def make(self, editor: StepEditor, count: int) -> None:
        source = self.begin.args[0]
        assert isinstance(source, fx.Node)
        rows = self._rows // count
        width = tensor_value(source).shape[1]
        shape = (rows, width)
        pieces = []
        for at in range(count):
            with editor.at(self.begin):
                piece = editor.view(
                    _aten.slice.Tensor,
                    (source, 0, at * rows, (at + 1) * rows),
                    shape,
                    tensor_value(source).stride,
                    source,
                )
                begun = editor.new(_GATHER, (piece, *self.begin.args[1:]), (rows * self.ranks, width))
                begun.meta["chunk"] = (self.begin.name, at)
                pieces.append(editor.waited(self.wait, begun))
        for product in self.products:
            place = _ROWS_AT[product.target]
            with editor.at(product):
                parts = []
                for piece in pieces:
                    columns = tensor_value(product).shape[1]
                    args = (*product.args[:place], piece, *product.args[place + 1 :])
                    parts.append(
                        editor.new(product.target, args, (rows * self.ranks, columns), product.kwargs)
                    )
                editor.replaced(product, self._in_order(editor, parts))
        if self.joined:
            with editor.at(self.wait):
                editor.replaced(self.wait, self._in_order(editor, pieces))
        editor.unused(self.wait)

    def _in_order(self, editor: StepEditor, pieces: Sequence[fx.Node]) -> fx.Node:
        """Rows of pieces, (piece, rank), in the order of the whole, (rank, piece)."""
        parts = []
        for piece in pieces:
            rows, columns = tensor_value(piece).shape
            shape: tuple[Any, ...] = (self.ranks, rows // self.ranks, columns)
            parts.append(
                editor.view(_aten.view.default, (piece, list(shape)), shape, contiguous_strides(shape), piece)
            )
        (_, rows, columns) = tensor_value(parts[0]).shape
        whole = editor.new(_aten.cat.default, (parts, 1), (self.ranks, rows * len(parts), columns))
        shape = (self.ranks * rows * len(parts), columns)
        return editor.view(_aten.view.default, (whole, list(shape)), shape, contiguous_strides(shape), whole)


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
        return (*self.tree, self.begin)

    def divides(self, count: int) -> bool:
        """Whether the columns divide into this number of chunks."""
        return int(tensor_value(self.begin).shape[-1]) % count == 0

    def make(self, editor: StepEditor, count: int) -> None:
        columns = int(tensor_value(self.begin).shape[-1]) // count
        received = []
        for at in range(count):
            chunks: dict[fx.Node, fx.Node] = {}
            for node in self.tree:
                with editor.at(self.begin, node):
                    chunks[node] = self._piece(editor, node, chunks, at * columns, columns)
            with editor.at(self.begin):
                given = self.begin.args[0]
                assert isinstance(given, fx.Node)
                shape = (*tensor_value(self.begin).shape[:-1], columns)
                begun = editor.new(self.begin.target, (chunks[given], *self.begin.args[1:]), shape)
                begun.meta["chunk"] = (self.begin.name, at)
                received.append(editor.waited(self.wait, begun))
        with editor.at(self.wait):
            editor.replaced(
                self.wait, editor.new(_aten.cat.default, (received, -1), tensor_value(self.wait).shape)
            )
        editor.unused(self.wait)

    @staticmethod
    def _piece(
        editor: StepEditor, node: fx.Node, chunks: dict[fx.Node, fx.Node], start: int, columns: int
    ) -> fx.Node:
        """Some columns of what a node of the tree gives."""
        shape = (*tensor_value(node).shape[:-1], columns)
        args: list[Any] = [chunks.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if is_product(node):
            factor = node.args[1]
            assert isinstance(factor, fx.Node)
            value = tensor_value(factor)
            dim = len(value.shape) - 1
            args[1] = editor.view(
                _aten.slice.Tensor,
                (factor, dim, start, start + columns),
                (*value.shape[:-1], columns),
                value.stride,
                factor,
            )
        elif node.target in RESHAPES:
            (given,) = (chunks[arg] for arg in node.all_input_nodes if arg in chunks)
            if len(args) > 1:
                args[1] = [*args[1][:-1], columns]
            return editor.view(node.target, tuple(args), shape, contiguous_strides(shape), given)
        return editor.new(node.target, tuple(args), shape, node.kwargs)


_Change = _Gathers | _Sends


def _gathers(step: StepGraph, begin: fx.Node, kept: set[int]) -> _Gathers | None:
    """The products of rows that a collective gathers; None where there are none."""
    wait, source = only_wait(begin), begin.args[0]
    if (
        wait is None
        or not isinstance(source, fx.Node)
        or not is_contiguous(begin, 2)
        or not is_contiguous(source, 2)
    ):
        return None
    products: list[fx.Node] = []
    joined = False
    pending = [wait]
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user.target in RESHAPES:
                pending.append(user)
            elif (
                user.target in _ROWS_AT
                and user.args[_ROWS_AT[user.target]] is node
                and user.all_input_nodes.count(node) == 1
                and tensor_value(node).shape == tensor_value(begin).shape
                and is_contiguous(user, 2)
                and (user.target is _aten.mm.default or len(tensor_value(user.args[0]).shape) == 1)
                and tensor_value(user).storage not in kept
            ):
                products.append(user)
            else:
                joined = True
    if not products or tensor_value(begin).storage in kept:
        return None
    return _Gathers(begin, wait, tuple(products), joined, len(group_of(step, begin).ranks))


def _sends(begin: fx.Node, kept: set[int]) -> _Sends | None:
    """The nodes that are computed for a collective alone, back to the products that it begins with; None where there
    are none."""
    wait = only_wait(begin)
    if wait is None or not is_contiguous(begin) or tensor_value(begin).storage in kept:
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
            or not is_contiguous(node)
            or tensor_value(node).storage in kept
        ):
            return None
        sources = column_sources(node)
        if sources is None:
            return None
        found.append(node)
        pending += sources
    return _Sends(begin, wait, tuple(reversed(found)), _SENDS[begin.target])
