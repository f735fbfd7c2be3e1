"""Expansion: a step of several micro-batches as one graph, written out from the loop over them.

Passes that plan over a whole step (budgets, the overlap of two micro-batches, the simulator) and the profiler want each
micro-batch with its own values. Nothing is captured again: of the loop's body

    nodes that run in each micro-batch     are copied, with storages and data-dependent sizes of their own
    nodes that run in the first or last    are there once, in their micro-batch
    totals                                 are what the first micro-batch computed, where that has its own memory,
                                           else a copy of it; later micro-batches are added in place

in time proportional to nodes · micro-batches. `unrolled` does so with a few micro-batches, and leaves a loop over them,
so that two micro-batches may be put side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.accumulate import Accumulation, When, when_of
from hyper_parallel.graph.copy_nodes import NodeCopies
from hyper_parallel.graph.graph_writer import GrowingGraph, span
from hyper_parallel.graph.ir import Input, StepGraph, Storage, Value, is_wait, values_of
from hyper_parallel.graph.memory_effects import begun, touched, writes

Numbered = Callable[[str, int], str]
"""(name of an input that differs between micro-batches, number of the micro-batch) to its name in the whole step."""


def expanded(loops: Sequence[Accumulation], numbered: Numbered) -> StepGraph:
    """The graph of a step whose i-th micro-batch is computed by the body of the i-th loop; it returns nothing.

    Loops of micro-batches that are alike are one object. Others are captured from the same model, so that they gather
    the same weights and have the same totals; raises GraphError where they do not.
    """
    expansion = _Expansion(loops, numbered)
    for number, loop in enumerate(loops):
        _MicroBatch(expansion, loop, number).copy_body()
    return expansion.finished(loops[0].body)


def unrolled(loop: Accumulation, width: int, numbered: Numbered) -> Accumulation:
    """The loop whose body computes this number of micro-batches, one after the other."""
    expansion = _Expansion([loop] * width, numbered, is_loop=True)
    for number in range(width):
        _MicroBatch(expansion, loop, number).copy_body()
    return Accumulation(
        expansion.finished(loop.body),
        loop.totals,
        expansion.added,
        {name: expansion.named[name] for name in loop.weights},
        frozenset(numbered(name, number) for name in loop.batch for number in range(width)),
        width * loop.width,
    )


class _Expansion(GrowingGraph):
    """The graph as it grows, and what all micro-batches share."""

    def __init__(self, loops: Sequence[Accumulation], numbered: Numbered, *, is_loop: bool = False) -> None:
        """`is_loop`: the graph is the body of a loop again, in which totals are inputs."""
        super().__init__()
        self.loops, self.is_loop, self.numbered = loops, is_loop, numbered
        self.storages += loops[0].body.storages
        self.lasting: dict[fx.Node, fx.Node] = {}
        """Nodes that run in the first micro-batch, and what they became."""
        self.added: dict[str, fx.Node] = {}
        """What adds to the totals first, by their names. In `named`, totals are as the last micro-batch so far has left
        them."""
        self.own = frozenset() if is_loop else _own_sums(loops[0])
        """Names of totals that need no memory besides the first micro-batch's."""
        self._add_inputs()

    def _add_inputs(self) -> None:
        first = self.loops[0]
        batch = False
        for entry, node in zip(first.body.inputs, first.body.placeholders, strict=True):
            if entry.name in first.batch:
                if not batch:
                    self._add_batches()
                batch = True
            elif self.is_loop or entry.name not in first.totals:
                self.add_input(entry, node, node.meta["value"])

    def _add_batches(self) -> None:
        for number, loop in enumerate(self.loops):
            for entry, node in zip(loop.body.inputs, loop.body.placeholders, strict=True):
                if entry.name in loop.batch:
                    name = self.numbered(entry.name, number)
                    value: Value = node.meta["value"]
                    storage = loop.body.storages[value.storage]
                    index = self.storage(storage.bytes, storage.device, name) if number else value.storage
                    self.add_input(Input(name, entry.kind), node, value.in_storage(index))


class _MicroBatch(NodeCopies):
    """Copies a loop's body for one micro-batch."""

    def __init__(self, whole: _Expansion, loop: Accumulation, number: int) -> None:
        self._expansion, self._loop, self._number = whole, loop, number
        self._runs: tuple[When, ...] = (
            "each",
            *(("first",) if number == 0 else ()),
            *(("last",) if number == len(whole.loops) - 1 else ()),
        )
        suffix = f"_of_{number}" if number else ""
        super().__init__(whole, loop.body, suffix, number * whole.loops[0].width, as_is=number == 0)

    def copy_body(self) -> None:
        """Append the nodes that run in this micro-batch."""
        whole, loop = self._expansion, self._loop
        self._place_inputs()
        additions = {node: name for name, node in loop.added.items()}
        weights = {node: name for name, node in loop.weights.items()}
        for node in loop.body.graph.nodes:
            if node.op == "get_attr":
                kind = next(at for at, one in enumerate(whole.loops) if one is loop)
                self.constant(node, f"{node.target}_{kind}" if kind else str(node.target))
            if node.op != "call_function" or when_of(node) not in self._runs:
                continue
            if node in additions:
                self.made[node] = self._total(node, additions[node])
            else:
                self._copied(node)
            if self._number == 0 and when_of(node) == "first":
                whole.lasting[node] = self.made[node]
            if self._number == 0 and node in weights:
                whole.named[weights[node]] = self.made[node]
        self.tell_sizes()
        for storage, name in loop.body.gradients.items():
            if "last" in self._runs and storage in self.storages:
                whole.gradients[self.storages[storage]] = name

    def _place_inputs(self) -> None:
        """Place the inputs of the body as the whole step has them."""
        whole, loop = self._expansion, self._loop
        for entry, node in zip(loop.body.inputs, loop.body.placeholders, strict=True):
            if whole.is_loop or entry.name not in loop.totals:
                name = whole.numbered(entry.name, self._number) if entry.name in loop.batch else entry.name
                self._known(node, name)
        if self._number:
            for name, node in (*loop.weights.items(), *_totals(loop).items()):
                self._known(node, name)
            for node, copy in whole.lasting.items():
                self.given(node, copy)

    def _known(self, node: fx.Node, name: str) -> None:
        if name not in self._expansion.named:
            raise GraphError(
                f"the micro-batches of a step differ, and what is known as {name} in one is not there in another"
            )
        self.given(node, self._expansion.named[name])

    def _total(self, node: fx.Node, name: str) -> fx.Node:
        """The total after this micro-batch, where `node` adds to it."""
        whole, (total, gradient) = self._expansion, node.args
        assert isinstance(total, fx.Node)
        assert isinstance(gradient, fx.Node)
        (value,) = values_of(node)
        if whole.is_loop:
            copy = self._copied(node)
            whole.added.setdefault(name, copy)
            return copy
        if self._number:
            copy = whole.named[name] = self._copied(node)
            return copy
        first = self.made[gradient]
        if name not in whole.own:
            first = whole.own_copy(first, value, node.meta)
        self.storages[value.storage] = next(values_of(first)).storage
        self.made[total] = whole.named[name] = first
        return first

    def _copied(self, node: fx.Node) -> fx.Node:
        copy = self.copy(node)
        if not self._expansion.is_loop:
            copy.meta.pop("when", None)
        return copy


def _totals(loop: Accumulation) -> dict[str, fx.Node]:
    """The body's inputs that are added to, by name."""
    inputs = zip(loop.body.inputs, loop.body.placeholders, strict=True)
    return {entry.name: node for entry, node in inputs if entry.name in loop.totals}


def _own_sums(loop: Accumulation) -> frozenset[str]:
    """The totals for which the first micro-batch's value can serve: it fills a storage that nothing else is in, and
    nothing writes to that afterwards, nor reads it behind the next micro-batch's sum."""
    body = loop.body
    summed = {name: node.args[1] for name, node in loop.added.items()}
    place = {node: at for at, node in enumerate(body.nodes)}
    born: dict[int, fx.Node] = {}
    wrote: dict[int, int] = {}
    for node, at in place.items():
        for value in values_of(node):
            born.setdefault(value.storage, node)
        wrote.update(dict.fromkeys(writes(node), at))
        if loop.width > 1:
            # Micro-batches side by side: all uses count.
            wrote.update(dict.fromkeys(touched(node), at))
            wrote.update(dict.fromkeys(touched(begun(node)) if is_wait(node) else (), at))
    shared = set(body.outside)
    shared |= {value.storage for node in loop.weights.values() for value in values_of(node)}
    of = {name: next(values_of(node)).storage for name, node in summed.items()}  # type: ignore[arg-type]
    counts = Counter(of.values())
    return frozenset(
        name
        for name, node in summed.items()
        if of[name] not in shared
        and counts[of[name]] == 1
        and when_of(born[of[name]]) == "each"
        and wrote.get(of[name], -1) <= place[loop.added[name]]
        and _fills(next(values_of(node)), body.storages[of[name]])  # type: ignore[arg-type]
    )


def _fills(value: Value, storage: Storage) -> bool:
    """Whether a value is all that is in a storage, each element once."""
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride, storage.bytes)):
        return False
    return bool(span(value) == value.elements and value.elements * value.dtype.itemsize == storage.bytes)
