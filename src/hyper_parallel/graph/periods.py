"""The graph of all layers, from a capture of few: periods written between two captured ones that are alike.

    captured     … A B …        forward, one period after the other       … B A …         backward
    assembled    … A 1 2 B …                                              … B 2 1 A …

Every run of A's nodes stands beside the run of B's that has the same nodes, and `period_pattern` says what they refer
to; a copy between them refers likewise, to its own nodes, to those of its neighbours, or to what is outside of all. A
node outside that takes a list with values of A and of B beside each other takes those of the copies between them; what
it gives may then have another shape, and so what is computed from it: such shapes are inferred again
(`infer_values`). Inputs, outputs, gradients and data-dependent sizes of the copies stand between those of A and B
likewise.

That all this is so is not known from one capture; who assembles a graph compares it with a capture of one period more
(`same_graph.difference`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from hyper_parallel.compat.fx_graph import Substitution, another_symbol, append_call, set_meta
from hyper_parallel.graph.graph_writer import GrowingGraph
from hyper_parallel.graph.ir import Even, Input, StepGraph, Value, mapped_value
from hyper_parallel.graph.period_pattern import (
    Counted,
    Made,
    Named,
    Next,
    Numbers,
    Own,
    Pair,
    Pattern,
    Previous,
    Renamer,
    Same,
    Unlike,
    Which,
    beside,
    inferred,
    pattern_of,
)
from hyper_parallel.graph.step_context import region_of

_T = TypeVar("_T")
_REFERENCES = frozenset({Same, Previous, Next})
_Item = tuple[_T, int | None]
"""Something of A in the period of this number, A's own being 0; None for what is of no period, or stays as it is."""


def assembled(
    step: StepGraph,
    pair: Pair,
    between: Sequence[int],
    numbered: Collection[str] = (),
    numbers: Numbers = lambda _: (),
) -> StepGraph:
    """The graph with a period between A and B for each of `between`: the index of its first layer, ascending.

    `numbered`: how the outputs' names begin that are followed by the output's number among those; `numbers`:
    what arguments may have of the names of their nodes' modules. Raises Unlike.
    """
    return _Assembly(step, pair, between, numbered, numbers).result()


class _Assembly:
    def __init__(
        self,
        step: StepGraph,
        pair: Pair,
        between: Sequence[int],
        numbered: Collection[str],
        numbers: Numbers,
    ) -> None:
        self._numbers = numbers
        self._step, self._renamer, self._numbered = step, Renamer(pair), tuple(numbered)
        self._pattern: Pattern = pattern_of(step, pair, self._renamer, numbers)
        self._first = [pair.a, *between, pair.b]
        """The first layer of each period."""
        self._last = len(self._first) - 1
        self._whole = GrowingGraph()
        self._made: dict[fx.Node, fx.Node] = {}
        """Nodes outside of A and B."""
        self._periods: list[dict[int, fx.Node]] = [{} for _ in self._first]
        """Nodes of each period by their number."""
        self._outside: dict[int, int] = {}
        self._of: list[dict[Made, int]] = [{} for _ in self._first]
        """Storages that each period makes."""
        self._input_of = dict(zip(step.placeholders, step.inputs, strict=True))
        self._symbols = self._fresh_symbols()
        self._sizes_of = [Substitution(symbols) for symbols in self._symbols]
        self._changed: set[fx.Node] = set()
        """New nodes outside whose values are not what they were."""

    def _fresh_symbols(self) -> list[dict[Any, Any]]:
        """For each period, A's symbols to its own."""
        own = self._pattern.own_symbols
        if not own:
            return [{} for _ in self._first]
        like = next(one.bytes for one in self._step.storages if isinstance(one.bytes, torch.SymInt))
        copies = [{symbol: another_symbol(like) for symbol in own} for _ in self._first[1:-1]]
        return [{}, *copies, own]

    def result(self) -> StepGraph:
        nodes = list(self._step.graph.nodes)
        places = [self._pattern.place.get(node) for node in nodes]
        for node, period in self._with_copies(nodes, places, complete=True):
            if node.op == "output":
                continue
            if period is None:
                self._write_outside(node)
            else:
                self._write(node, period)
        whole = self._whole
        whole.gradients, whole.sizes, whole.even = self._gradients(), self._sizes(), self._even()
        assembled = whole.finished(self._step, self._outputs())
        assembled.slots = self._step.slots
        return assembled

    # Runs

    def _with_copies(
        self, items: Sequence[_T], places: Sequence[tuple[Which, Any] | None], *, complete: bool
    ) -> list[_Item[_T]]:
        """The items, those of all periods where A's and B's stand beside each other. Raises Unlike where `complete` and
        some of A or B stand elsewhere."""
        found: list[_Item[_T]] = []
        pairs = {min(a.start, b.start): (a, b) for a, b in beside(places)}
        at = 0
        while at < len(items):
            if at not in pairs:
                if complete and places[at] is not None:
                    raise Unlike(f"{items[at]} stands beside none of the other period")
                found.append((items[at], None))
                at += 1
                continue
            a, b = pairs[at]
            periods = range(self._last + 1)
            for period in periods if a.start < b.start else reversed(periods):
                found += [(items[place], period) for place in a]
            at = max(a.stop, b.stop)
        return found

    # Nodes

    def _write(self, template: fx.Node, period: int) -> None:
        """The node of a period that is like `template`, which is A's."""
        at, first = self._pattern.place[template][1], self._first[period]
        region = self._renamer.region(region_of(template), first)
        module = self._renamer.name(template.meta["module"], first)
        entry = self._input_of.get(template)
        if entry is not None:
            entry = Input(self._renamer.name(entry.name, first), entry.kind)
        name = entry.name if entry is not None else None
        value = mapped_value(template.meta.get("value"), lambda one: self._placed(one, period, name))
        args, kwargs = self._pattern.arguments[at]
        node = self._append(template, self._filled(args, period), self._filled(kwargs, period), entry)
        meta = {**template.meta, "region": region, "module": module}
        if "value" in template.meta:
            meta["value"] = value
        set_meta(node, meta)
        self._periods[period][at] = node

    def _append(self, like: fx.Node, args: Any, kwargs: Any, entry: Input | None) -> fx.Node:
        whole = self._whole
        if entry is not None:
            whole.inputs.append(entry)
            return whole.graph.placeholder(f"in_{len(whole.inputs) - 1}")
        if like.op == "get_attr":
            name = f"constant_{len(whole.constants)}"
            whole.constants[name] = self._step.constants[str(like.target)]
            return whole.graph.create_node("get_attr", name)
        return append_call(whole.graph, like.name, like.target, args, kwargs)

    def _filled(self, pattern: Any, period: int) -> Any:
        """Arguments of a node of this period."""
        kind = type(pattern)
        if kind is Own:
            return self._periods[period][pattern.at]
        if kind in _REFERENCES:
            return self._referred(pattern, period)
        if kind is tuple or kind is list:
            return kind([self._filled(one, period) for one in pattern])
        if kind is dict:
            return {key: self._filled(one, period) for key, one in pattern.items()}
        if kind is Counted:
            return pattern.start + period * pattern.step
        if kind is Named:
            return self._numbers(self._renamer.name(pattern.module, self._first[period]))[pattern.at]
        return pattern

    def _referred(self, reference: Same | Previous | Next, period: int) -> fx.Node:
        if isinstance(reference, Previous):
            return self._node(reference.first) if period == 0 else self._periods[period - 1][reference.at]
        if isinstance(reference, Next):
            last = period == self._last
            return self._node(reference.last) if last else self._periods[period + 1][reference.at]
        return self._node(reference.what)

    def _node(self, node: fx.Node) -> fx.Node:
        """The node that a node of the captured graph became."""
        known = self._pattern.place.get(node)
        if known is None:
            return self._made[node]
        return self._periods[0 if known[0] == "a" else self._last][known[1]]

    # Values

    def _placed(self, value: Value, period: int, name: str | None) -> Value:
        reference = self._pattern.storages[value.storage]
        size_of = self._sizes_of[period]
        if isinstance(reference, Own):
            index = self._of[period].get(reference.at)
            if index is None:
                one = self._step.storages[value.storage]
                index = self._of[period][reference.at] = self._whole.storage(
                    size_of(one.bytes), one.device, name
                )
        elif isinstance(reference, Previous):
            index = self._known(reference.first) if period == 0 else self._of[period - 1][reference.at]
        elif isinstance(reference, Next):
            last = period == self._last
            index = self._known(reference.last) if last else self._of[period + 1][reference.at]
        else:
            index = self._known(reference.what)
        shape, stride = value.shape, value.stride
        if self._symbols[period]:
            shape = tuple(map(size_of, shape))
            stride = tuple(map(size_of, stride))
        return Value(shape, stride, value.dtype, value.device, index)

    def _known(self, storage: int) -> int:
        """Where a storage of the captured graph is."""
        maker = self._pattern.makers.get(storage)
        if maker is not None:
            return self._of[0 if maker[0] == "a" else self._last][maker[1]]
        index = self._outside.get(storage)
        if index is None:
            one = self._step.storages[storage]
            index = self._outside[storage] = self._whole.storage(one.bytes, one.device, one.name)
        return index

    # Nodes outside of the periods

    def _write_outside(self, node: fx.Node) -> None:
        args, kwargs = self._taken(node.args), self._taken(node.kwargs)
        copy = self._made[node] = self._append(node, args, kwargs, self._input_of.get(node))
        copy.meta = dict(node.meta)
        if "value" not in node.meta:
            return
        value = mapped_value(node.meta["value"], lambda one: one.in_storage(self._known(one.storage)))
        grown = len(copy.all_input_nodes) != len(node.all_input_nodes)
        if grown or not self._changed.isdisjoint(copy.all_input_nodes):
            before = value
            value, sizes = inferred(copy, before)
            storages = self._whole.storages
            for storage, size in sizes.items():
                storages[storage] = replace(storages[storage], bytes=size)
            if value != before:
                self._changed.add(copy)
        copy.meta["value"] = value

    def _taken(self, argument: Any) -> Any:
        """An argument of a node outside, with what copies give."""
        if isinstance(argument, fx.Node):
            return self._node(argument)
        if isinstance(argument, tuple | list):
            places = [self._pattern.place.get(one) if isinstance(one, fx.Node) else None for one in argument]
            taken = [
                self._taken(one) if period is None else self._periods[period][self._pattern.place[one][1]]  # type: ignore[index]
                for one, period in self._with_copies(argument, places, complete=False)
            ]
            return type(argument)(taken) if not isinstance(argument, list) else taken
        if isinstance(argument, dict):
            return {key: self._taken(one) for key, one in argument.items()}
        return argument

    # What the graph says besides its nodes

    def _outputs(self) -> dict[str, fx.Node]:
        returned = self._step.output.args[0]
        assert isinstance(returned, tuple | list)
        places = [self._pattern.place.get(one) for one in returned]  # type: ignore[arg-type]
        entries = list(zip(self._step.outputs, returned, strict=True))
        names, given = [], []
        for (name, source), period in self._with_copies(entries, places, complete=False):
            if period is None:
                names.append(name)
                given.append(self._node(source))  # type: ignore[arg-type]
            else:
                names.append(self._renamer.name(name, self._first[period]))
                given.append(self._periods[period][self._pattern.place[source][1]])  # type: ignore[index]
        return dict(zip(self._counted(names), given, strict=True))

    def _counted(self, names: list[str]) -> list[str]:
        """The names, those that are numbers after a common beginning counted anew."""
        counts = dict.fromkeys(self._numbered, 0)
        found = []
        for name in names:
            stem = next(
                (one for one in self._numbered if name.startswith(one) and name[len(one) :].isdigit()), None
            )
            if stem is not None:
                counts[stem] += 1
            found.append(name if stem is None else f"{stem}{counts[stem] - 1}")
        return found

    def _gradients(self) -> dict[int, str]:
        entries = list(self._step.gradients.items())
        places = [self._pattern.makers.get(storage) for storage, _ in entries]
        return {
            self._known(storage)
            if period is None
            else self._of[period][self._pattern.makers[storage][1]]: name
            if period is None
            else self._renamer.name(name, self._first[period])
            for (storage, name), period in self._with_copies(entries, places, complete=True)
        }

    def _sizes(self) -> dict[Any, fx.Node]:
        entries = list(self._step.sizes.items())
        places = [self._pattern.place.get(node) for _, node in entries]
        found = {}
        for (symbol, node), period in self._with_copies(entries, places, complete=True):
            if period is None:
                found[symbol] = self._node(node)
            else:
                node_of_period = self._periods[period][self._pattern.place[node][1]]
                found[self._symbols[period].get(symbol, symbol)] = node_of_period
        return found

    def _even(self) -> dict[Any, Even]:
        own = self._pattern.own_symbols
        of_b = set(own.values())
        found: dict[Any, Even] = {}
        parts: dict[tuple[int, int], int] = {}
        for symbol, even in self._step.even.items():
            if symbol in of_b:
                continue
            for period in range(self._last + 1) if symbol in own else [0]:
                part = parts.setdefault((even.part, period), len(parts))
                known = self._symbols[period].get(symbol, symbol)
                found[known] = Even(even.rows, even.scales, part, even.most)
        return found
