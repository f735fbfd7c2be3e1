"""Compilation of a step: runs of neighbouring nodes become one node that calls Inductor's code, cached on disk."""

from __future__ import annotations

import hashlib
import itertools
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hyper_parallel._version import __version__
from hyper_parallel.compat import inductor
from hyper_parallel.errors import CompileError
from hyper_parallel.graph.accumulate import When, when_of
from hyper_parallel.graph.artifacts import obtain, own
from hyper_parallel.graph.ir import StepGraph, is_wait, values_of
from hyper_parallel.graph.likeness import likeness
from hyper_parallel.graph.memory_effects import draws_random, is_view, writes
from hyper_parallel.graph.step_context import region_of

__all__ = ["LIMIT_SECONDS", "Compiled", "compiled", "is_compiled"]


# Partition of a step into subgraphs that are compiled together.
#
# A subgraph is a run of neighbours in the order of the step, so replacing it by one node moves nothing past anything.
# It ends
#
# - at whatever has its own order: a collective, its wait, a host point, an operator that is not PyTorch's;
# - at what a compiler would do differently (random numbers) or cannot know (sizes that depend on the data);
# - where what runs in each micro-batch meets what runs in one of them (`graph.accumulate`);
# - where the next layer begins (`graph.step_context`). Layers that are alike give subgraphs that are alike, which are
# compiled
#   once; so compiling takes as long for eighty layers as for two.
#
# Only the forward pass, the loss and the backward pass are cut up; the update's operators are whole kernels already.
#
# No memory goes across a subgraph's boundary under two names: a view that comes from outside is taken again inside, a
# view that goes outside is taken again there, and what an in-place operator gives is what it was given.

_PHASES = frozenset({"forward", "loss", "backward"})
_NAMESPACES = frozenset({"aten", "prims"})
FEWEST = 4
"""Nodes that compute, not counting views: below it, a call of a compiled function costs what it saves."""


@dataclass(frozen=True)
class Subgraph:
    """Neighbours that are compiled together."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """What is read from outside, each its own memory, in order of first use. A subgraph may write to it."""
    outputs: tuple[fx.Node, ...]
    """What is used outside, each its own memory."""

    def graph(self) -> fx.Graph:
        """Computes the outputs from the inputs: the subgraph's nodes, in-place ones as they are."""
        graph = fx.Graph()
        inputs = {node: graph.placeholder(f"input_{at}") for at, node in enumerate(self.inputs)}
        for node, given in inputs.items():
            given.meta["value"] = node.meta["value"]

        def found(node: fx.Node) -> fx.Node:
            if node not in inputs:
                node = original(node)
            if node not in inputs:
                inputs[node] = again(node, graph, found)
            return inputs[node]

        for node in self.nodes:
            for source in node.all_input_nodes:
                found(source)
            inputs[node] = graph.node_copy(node, found)
        graph.output(tuple(inputs[node] for node in self.outputs))
        return graph


def partition(step: StepGraph) -> list[Subgraph]:
    """All that is worth compiling, in order."""
    found = []
    for place, run in itertools.groupby(step.nodes, _place):
        nodes = tuple(run)
        if place is not None and sum(_computes(node) for node in nodes) >= FEWEST:
            subgraph = _subgraph(nodes)
            if _own_memory(subgraph.inputs) and _own_memory(subgraph.outputs):
                found.append(subgraph)
    return found


def original(node: fx.Node) -> fx.Node:
    """The node that first gave this tensor: an in-place operator gives back what it was given."""
    while node.op == "call_function" and writes(node) and not is_wait(node):
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or changed.meta.get("value") != node.meta.get("value"):
            break
        node = changed
    return node


def takes_a_view(node: fx.Node) -> bool:
    """Whether a node gives what is there another shape, which can be done again anywhere."""
    return node.target is not operator.getitem and is_view(node) and _compilable(node)


def again(node: fx.Node, graph: fx.Graph, source_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A view, taken again of what `source_of` gives for its arguments."""
    for source in node.all_input_nodes:
        source_of(source)  # before the view itself is written down
    copy = graph.node_copy(node, source_of)
    copy.meta = dict(node.meta)
    return copy


def _place(node: fx.Node) -> tuple[str, When] | None:
    """The layer of a node, "" outside of all layers, and when it runs; None for one that cannot be compiled."""
    region = region_of(node)
    return (region.layer, when_of(node)) if region.phase in _PHASES and _compilable(node) else None


def _compilable(node: fx.Node) -> bool:
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _compilable(source)
    return (
        node.op == "call_function"
        and getattr(target, "namespace", "") in _NAMESPACES
        and not draws_random(node)
        and all(_is_fixed(part) for part in (node, *node.all_input_nodes))
    )


def _is_fixed(node: fx.Node) -> bool:
    """Whether a node gives tensors whose sizes are known."""
    values = list(values_of(node))
    return bool(values) and not any(
        isinstance(size, torch.SymInt) for value in values for size in (*value.shape, *value.stride)
    )


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view(node)


def _subgraph(nodes: tuple[fx.Node, ...]) -> Subgraph:
    inside = frozenset(nodes)
    outer = frozenset(source for node in nodes for source in node.all_input_nodes) - inside
    read = (source for node in nodes for source in node.all_input_nodes if source in outer)
    used = (node for node in nodes if any(user not in inside for user in node.users))
    return Subgraph(
        nodes,
        tuple(dict.fromkeys(_roots(read, None))),
        tuple(root for root in dict.fromkeys(_roots(used, inside)) if root in inside),
    )


def _roots(nodes: Iterable[fx.Node], within: Collection[fx.Node] | None) -> Iterator[fx.Node]:
    """The nodes that first gave the memory of `nodes`; the search does not leave `within`."""
    for node in nodes:
        root = original(node)
        if takes_a_view(root) and (within is None or root in within):
            yield from _roots(root.all_input_nodes, within)
        else:
            yield root


def _own_memory(nodes: tuple[fx.Node, ...]) -> bool:
    storages = [value.storage for node in nodes for value in values_of(node)]
    return len(storages) == len(set(storages))


def digest(subgraph: Subgraph, environment: Mapping[str, str]) -> str:
    """32 hexadecimal digits. Subgraphs of the same operators on tensors of the same kind have the same one, wherever in
    a step they are and whatever its nodes are called."""
    content = repr((likeness(subgraph.graph().nodes), sorted(environment.items())))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


Function = Callable[..., Sequence[torch.Tensor]]
"""A subgraph's inputs to its outputs."""


class _Call:
    """The target of a subgraph's node."""

    def __init__(self, name: str, function: Function) -> None:
        self.__name__ = name
        self._op = function  # what a graph that runs calls

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._op(*tensors)


def is_compiled(node: fx.Node) -> bool:
    """Whether a node calls compiled code."""
    return isinstance(node.target, _Call)


def replace(step: StepGraph, found: Sequence[Subgraph], functions: Sequence[tuple[str, Function]]) -> None:
    """Exchange, in place, each subgraph of `partition(step)` for a call of its function, which has a name."""
    outputs: dict[fx.Node, fx.Node] = {}
    for subgraph, (name, function) in zip(found, functions, strict=True):
        _replace(step, subgraph, _Call(name, function), outputs)
    for node in reversed([*step.graph.nodes]):
        if not node.users and node.op == "call_function" and takes_a_view(node):
            step.graph.erase_node(node)  # only subgraphs looked through it
    step.graph.lint()


def _replace(step: StepGraph, subgraph: Subgraph, call: _Call, copies: dict[fx.Node, fx.Node]) -> None:
    """One node in the place of the subgraph's last, and a node for each of its outputs, written into `copies`."""
    graph, last, inside = step.graph, subgraph.nodes[-1], frozenset(subgraph.nodes)
    meta = {
        "region": last.meta["region"],
        "module": last.meta["module"],
        "recomputed": all(node.meta["recomputed"] for node in subgraph.nodes),
        **{key: last.meta[key] for key in ("when",) if key in last.meta},
    }
    given = {value.storage for node in subgraph.inputs for value in values_of(node)}
    written = {storage for node in subgraph.nodes for storage in writes(node)} & given
    with graph.inserting_after(last):
        node = graph.call_function(call, tuple(copies.get(source, source) for source in subgraph.inputs))
    node.meta.update(
        meta,
        value=tuple(output.meta["value"] for output in subgraph.outputs),
        writes=tuple(sorted(written)),
    )
    following = node.next
    with graph.inserting_before(following):
        for at, output in enumerate(subgraph.outputs):
            copies[output] = graph.call_function(operator.getitem, (node, at))
            copies[output].meta.update(meta, value=output.meta["value"])

        def outside(source: fx.Node) -> fx.Node:
            """The node behind the subgraph that stands for one in it."""
            root = original(source)
            if root not in inside:
                return root
            if root not in copies:
                assert takes_a_view(root), f"{root} is no output of its subgraph"
                copies[root] = again(root, graph, outside)
            return copies[root]

        for old in subgraph.nodes:
            if any(user not in inside for user in old.users):
                new = outside(old)
                old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for old in reversed(subgraph.nodes):
        graph.erase_node(old)


# Compiles subgraphs of a step: each becomes one node that calls Inductor's code.
#
# Compiled arithmetic is not that of the operators one by one: sums are taken in another order, and several roundings to
# bf16 become one. docs/compile.md says by how much results differ.

LIMIT_SECONDS = 900.0
"""After which no further subgraph is compiled."""


@dataclass(frozen=True)
class Compiled:
    """A compiled step."""

    step: StepGraph
    subgraphs: int
    """Nodes of `step` that call compiled code."""
    artifacts: int
    """Different ones among them."""
    made: int
    """Artifacts that this process compiled; the others were there, or other ranks compiled them."""
    share: float
    """Of the step's operators, how many are in subgraphs: 0 to 1."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"compiled {self.share:.0%} of the step's operators in {self.seconds:.1f} s "
            f"({self.subgraphs} subgraphs, {self.artifacts} different, {self.artifacts - self.made} from the cache)"
        )


def compiled(step: StepGraph, folder: Path, limit: float = LIMIT_SECONDS) -> Compiled:
    """Compile what can be; `step` stays as it is. Artifacts are kept in `folder` and taken from there.

    Every rank of a run may call it at the same time. Raises CompileError when it cannot be done on this machine, takes
    longer than `limit` seconds, or the compiler fails; `step` can run then as it is.
    """
    start = time.monotonic()
    result = step.copy()
    found = partition(result)
    try:
        if found and (lacking := inductor.missing()) is not None:
            raise CompileError(f"{lacking} is missing")
        folder = own(folder)
        environment = (
            {"hyper_parallel": __version__, **inductor.environment(folder / "probes")} if found else {}
        )
        names = [digest(subgraph, environment) for subgraph in found]
        ready, made = obtain(
            folder,
            {name: _maker(subgraph) for name, subgraph in zip(names, found, strict=True)},
            inductor.load,
            start + limit,
        )
    except CompileError:
        raise
    except TimeoutError as error:
        raise CompileError(f"{error} after {limit:.0f} s") from error
    except Exception as error:  # the compiler's own, of any kind
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CompileError(f"{type(error).__name__}: {reason}") from error
    share = sum(len(subgraph.nodes) for subgraph in found) / max(1, sum(1 for _ in step.nodes))
    replace(result, found, [(f"compiled_{name[:8]}", ready[name]) for name in names])
    return Compiled(result, len(found), len(ready), made, share, time.monotonic() - start)


def _maker(subgraph: Subgraph) -> Callable[[Path], None]:
    inputs = [
        (value.shape, value.stride, value.dtype, value.device)
        for node in subgraph.inputs
        for value in values_of(node)
    ]
    return lambda folder: inductor.compile_into(folder, subgraph.graph(), inputs)
