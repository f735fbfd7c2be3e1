"""Gradient accumulation: a step of several micro-batches as a loop, its function, and whether it can begin again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from hyper_parallel.compat.fx_graph import copy_node
from hyper_parallel.errors import GraphError
from hyper_parallel.graph.dependencies import Needs, data_sources, needed, stops
from hyper_parallel.graph.execute import GraphFunction, Host, SourceWriter, refuse_balanced, run_with_host
from hyper_parallel.graph.graph_writer import moved_meta, moved_storages, span
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import Input, StepGraph, Storage, Value, is_cache, values_of
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.step_context import region_of


def changed_input(
    step: StepGraph, stops: Collection[fx.Node], loop: Accumulation | None = None
) -> str | None:
    """The name of an input that a run may have written to when it stops at or in one of the nodes `stops`; None where
    there is none. `loop`: the loop whose body `step` is; its totals are zero before each run, and are no inputs.
    """
    nodes = list(step.nodes)
    last = max((at for at, node in enumerate(nodes) if node in stops), default=-1)
    # The body's end has run before whatever runs in its second micro-batch.
    repeats = loop is not None and any(when_of(node) != "first" for node in stops)
    totals = loop.totals if loop is not None else ()
    outside = {storage: one.name for storage, one in step.outside.items() if one.name not in totals}
    for at, node in enumerate(nodes):
        before = at <= last or (repeats and when_of(node) != "last")
        if before and not is_cache(node) and (changed := outside.keys() & writes(node)):
            return outside[min(changed)]
    return None


# Gradient accumulation: the captured step of one micro-batch as the body of a loop over a step's micro-batches.
#
# Every node runs in each micro-batch, but for those with `meta["when"]`:
#
#     first     gathers of weights once a step; their results stay for all micro-batches
#     last      what runs once a step at its end: reductions, norm, clipping, the update
#
# in the order of the captured step. Gradients, the loss and counts are added to `totals`, each as soon as it is
# computed; what runs once a step uses the sums. `execute` runs the loop, `expand` writes it out.

When = Literal["first", "each", "last"]
"""The micro-batches in which a node runs."""

_ADD = torch.ops.aten.add_.Tensor


def when_of(node: fx.Node) -> When:
    """The micro-batches in which a node of a loop's body runs."""
    found: When = node.meta.get("when", "each")
    return found


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A step of two or more micro-batches as a loop."""

    body: StepGraph
    """Without outputs. Executed once, in all its nodes, it is a step of one micro-batch."""
    totals: Mapping[str, Value]
    """Inputs of the body that are added to, by name; zero before a step."""
    added: Mapping[str, fx.Node]
    """The nodes that add to them first, by the same names."""
    weights: Mapping[str, fx.Node]
    """What is gathered once a step, by name."""
    batch: frozenset[str]
    """Names of the inputs that differ from micro-batch to micro-batch."""
    width: int = 1
    """Micro-batches of one run of the body."""
    short: Callable[[], Accumulation] | None = None
    """Makes the same loop of the model with few of its layers, as `StepGraph.short`."""

    def with_body(self, body: StepGraph) -> Accumulation:
        """The same loop over a body whose nodes a pass has put into another order."""
        named = {node.name: node for node in body.graph.nodes}
        added = {name: named[node.name] for name, node in self.added.items()}
        weights = {name: named[node.name] for name, node in self.weights.items() if node.name in named}
        return replace(self, body=body, added=added, weights=weights)


def accumulation(
    step: StepGraph,
    weights: Mapping[str, fx.Node],
    sums: Mapping[str, fx.Node],
    batch: Collection[str],
    needs: Needs | None = None,
) -> Accumulation:
    """The loop over micro-batches whose body is this captured step, which is changed in place.

    `weights`: what is gathered once a step; `sums`: what is added up over its micro-batches; by name. `batch`: the
    names of the inputs that differ from micro-batch to micro-batch. `needs`: the step's data flow where it is known.
    Raises GraphError where what runs once a step uses values of a micro-batch that are no sums: it would see those of
    the last one alone.
    """
    needs = data_sources(step) if needs is None else needs
    cut = _Cut(step, weights, {node: name for name, node in sums.items()}, needs)
    cut.check(batch)
    totals = cut.totals()
    added = cut.apply(totals)
    values: dict[str, Value] = {name: node.meta["value"] for name, node in totals.items()}
    return Accumulation(step, values, added, dict(weights), frozenset(batch))


class _Cut:
    """The nodes of a step by when they run."""

    def __init__(
        self, step: StepGraph, weights: Mapping[str, fx.Node], sums: Mapping[fx.Node, str], needs: Needs
    ) -> None:
        self._step, self._sums = step, sums
        lasting = set(step.outside)
        effects = [node for node in needs if writes(node) & lasting or node.target is HOST]
        once = [node for node in effects if _is_epilogue(node)]
        each = [node for node in effects if not _is_epilogue(node)]
        self._once = needed(needs, once, stops(needs, sums))
        self._behind = _behind(self._once, needs, sums)
        given = set(weights.values())
        self._micro = needed(needs, [*each, *sums], stops(needs, given))
        self._gathers = needed(needs, list(given))

    def check(self, batch: Collection[str]) -> None:
        """Raise GraphError where what runs once depends on these inputs but through sums."""
        inputs = zip(self._step.inputs, self._step.placeholders, strict=True)
        varies = {node for entry, node in inputs if entry.name in batch}
        for node in self._step.nodes:
            if node in self._once and any(
                one in varies and one not in self._sums for one in node.all_input_nodes
            ):
                varies.add(node)
                if _is_epilogue(node):
                    raise GraphError(
                        f"a step of several micro-batches cannot be cut: {node.target}, which runs once a step, "
                        "uses values of one micro-batch that are no gradient, loss or count"
                    )

    def totals(self) -> dict[str, fx.Node]:
        """Add inputs for the sums."""
        step = self._step
        found: dict[str, fx.Node] = {}
        last = step.placeholders[-1]
        for node, name in self._sums.items():
            (value,) = values_of(node)
            index = len(step.storages)
            step.storages.append(Storage(index, span(value) * value.dtype.itemsize, value.device, name))
            step.inputs.append(Input(name, "gradient"))
            if value.storage in step.gradients:
                step.gradients[index] = step.gradients.pop(value.storage)
            with step.graph.inserting_after(last):
                last = found[name] = step.graph.placeholder(f"total_{node.name}")
            last.meta.update(node.meta, value=value.in_storage(index))
        return found

    def apply(self, totals: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
        """Add what is added up, have what runs once use the sums, and say what runs when. Returns what adds to each."""
        step = self._step
        added: dict[str, fx.Node] = {}
        instead: dict[fx.Node, fx.Node] = {}
        """What nodes became for those that use sums."""
        before: dict[fx.Node, Any] = {}
        """The values of these, as they lay in memory before."""
        unused = []
        for node in list(step.nodes):
            end = node
            if node in self._sums:
                before[node] = node.meta["value"]
                name = self._sums[node]
                instead[node] = added[name] = end = self._added(node, totals[name])
            if node in self._behind:
                before[node] = node.meta.get("value")
                result = node
                if node in self._micro:
                    with step.graph.inserting_after(end):
                        result = copy_node(step.graph, node, lambda source: source)
                self._use_sums(result, instead, before)
                instead[node] = result
            elif node not in self._micro:
                if node in self._gathers or node in self._once:
                    node.meta["when"] = "first" if node in self._gathers else "last"
                else:
                    unused.append(node)
        step.output.args, step.outputs = ((),), []
        for node in reversed(unused):
            step.graph.erase_node(node)
        dropped = set(unused)
        step.sizes = {symbol: node for symbol, node in step.sizes.items() if node not in dropped}
        return added

    def _added(self, node: fx.Node, total: fx.Node) -> fx.Node:
        with self._step.graph.inserting_after(node):
            added = self._step.graph.call_function(_ADD, (total, node))
        added.meta.update(node.meta, value=total.meta["value"])
        return added

    @staticmethod
    def _use_sums(node: fx.Node, instead: Mapping[fx.Node, fx.Node], before: Mapping[fx.Node, Any]) -> None:
        """Have a node run once, on sums."""
        moved: dict[int, int] = {}
        for source in list(node.all_input_nodes):
            if source in instead:
                moved.update(moved_storages(before[source], instead[source].meta.get("value")))
                node.replace_input_with(source, instead[source])
        node.meta = {**moved_meta(node, moved), "when": "last"}


def _is_epilogue(node: fx.Node) -> bool:
    """Whether a node was captured outside of the micro-batch: clipping, the host points of the step, the update."""
    return region_of(node).micro_batch is None


def _behind(once: Collection[fx.Node], needs: Needs, sums: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that run once a step and use sums."""
    found: set[fx.Node] = set()
    for node in needs:
        if node in once and any(source in sums or source in found for source in needs[node]):
            found.add(node)
    return found


# Executor of a step of several micro-batches: one Python function that loops over them.
#
#     for first, last, (ids, labels, …) in batches:
#         if first: weight = gather(…)
#         …
#         total = add_(total, gradient)
#         if last: reduced = reduce(total)
#
# The body is written once, however many micro-batches there are. What is computed in the first micro-batch alone is
# kept until its last use in the last one; everything else is let go of in its own micro-batch.


@dataclass(frozen=True)
class LoopExecutable(GraphFunction):
    """A loop over micro-batches, ready to run."""

    inputs: tuple[str, ...]
    """Names of what all micro-batches are given: first what is not in `totals`, then the totals."""
    batch: tuple[str, ...]
    """Names of what each is given, as those of the first micro-batch."""
    totals: Mapping[str, Value]

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        host: Host | None = None,
    ) -> None:
        """Run a step on `tensors`, by the names of `inputs`, and on `micro_batches`, by the names of `batch`; state is
        updated in place. Raises what `host` raises; nothing behind that host point has run then."""
        last = len(micro_batches) - 1
        batches = [
            (at == 0, at == last, [given[name] for name in self.batch])
            for at, given in enumerate(micro_batches)
        ]
        # Handed over without being kept here, so that the function can let go of them.
        steps = self.function(
            [_zeros(self.totals[name]) if name in self.totals else tensors[name] for name in self.inputs],
            batches,
        )
        run_with_host(steps, host)


def loop_executable(loop: Accumulation, body: StepGraph | None = None) -> LoopExecutable:
    """The Python function of a step of several micro-batches. `body`: what the loop's body was compiled to.

    Raises CaptureError as `execute.executable`.
    """
    body = loop.body if body is None else body
    refuse_balanced(body)
    writer = _LoopWriter(body, loop)
    source, function = writer.compiled("loop over")
    names = [entry.name for entry in body.inputs]
    return LoopExecutable(
        source,
        function,
        writer.lines,
        tuple(name for name in names if name not in loop.batch),
        tuple(name for name in names if name in loop.batch),
        loop.totals,
    )


class _LoopWriter(SourceWriter):
    def __init__(self, body: StepGraph, loop: Accumulation) -> None:
        super().__init__(body, None, None, {})
        self._loop = loop

    def source(self) -> str:
        named = list(zip(self.step.inputs, self.step.placeholders, strict=True))
        given = [self.variable(node) for entry, node in named if entry.name not in self._loop.batch]
        varying = [self.variable(node) for entry, node in named if entry.name in self._loop.batch]
        constants = [
            f"{self.variable(node)} = {node.target}"
            for node in self.step.graph.nodes
            if node.op == "get_attr"
        ]
        unpacked = f"{', '.join(given)}, = inputs" if given else "pass"
        lines = [
            "def step(inputs, batches):",
            *(f"    {line}" for line in (unpacked, "del inputs", *constants)),
            f"    for first, last, ({''.join(f'{name}, ' for name in varying)}) in batches:",
        ]
        guard: When = "each"
        for when, text, node in self._statements():
            if when != guard and when != "each":
                lines.append(f"        if {when}:")
            guard = when
            lines.append(f"{' ' * (8 if when == 'each' else 12)}{text}")
            if node is not None:
                self.lines[len(lines)] = node
        # A generator, also where no node asks the host.
        lines += ["    return ()", "    yield"]
        return "".join(f"{line}\n" for line in lines)

    def _statements(self) -> Iterator[tuple[When, str, fx.Node | None]]:
        """The loop's body: when each line runs, the line, and the node that it runs."""
        inputs = dict(zip(self.step.placeholders, self.step.inputs, strict=True))
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                yield when_of(node), self.line(node), node
            dead: dict[When, list[str]] = {}
            for source in self.last.get(node, ()):
                if source.op == "call_function":
                    dead.setdefault(_let_go(source), []).append(self.variable(source))
                elif source in inputs and inputs[source].name in self._loop.totals:
                    dead.setdefault("last", []).append(self.variable(source))
            for when, names in dead.items():
                yield when, f"del {', '.join(names)}", None


def _let_go(node: fx.Node) -> When:
    """The micro-batches in which a value dies."""
    when = when_of(node)
    if when == "first" and any(when_of(user) != "first" for user in node.users):
        return "last"
    return when


def _zeros(like: Value) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()
