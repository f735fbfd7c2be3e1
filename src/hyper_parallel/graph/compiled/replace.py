"""Replaces each compiled subgraph by one node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from hyper_parallel.graph.compiled.partition import Subgraph, again, original, takes_a_view
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.memory_effects import writes

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


def _replace(step: StepGraph, subgraph: Subgraph, call: _Call, made: dict[fx.Node, fx.Node]) -> None:
    """One node in the place of the subgraph's last, and a node for each of its outputs, written into `made`."""
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
        node = graph.call_function(call, tuple(made.get(source, source) for source in subgraph.inputs))
    node.meta.update(
        meta,
        value=tuple(output.meta["value"] for output in subgraph.outputs),
        writes=tuple(sorted(written)),
    )
    following = node.next
    with graph.inserting_before(following):
        for at, output in enumerate(subgraph.outputs):
            made[output] = graph.call_function(operator.getitem, (node, at))
            made[output].meta.update(meta, value=output.meta["value"])

        def outside(source: fx.Node) -> fx.Node:
            """What a node of the subgraph is, behind it."""
            root = original(source)
            if root not in inside:
                return root
            if root not in made:
                assert takes_a_view(root), f"{root} is no output of its subgraph"
                made[root] = again(root, graph, outside)
            return made[root]

        for old in subgraph.nodes:
            if any(user not in inside for user in old.users):
                new = outside(old)
                old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for old in reversed(subgraph.nodes):
        graph.erase_node(old)
