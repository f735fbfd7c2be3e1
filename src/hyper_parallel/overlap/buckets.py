"""Bucketing: several small collectives become one, which pays latency once.

Gathers of weights that stand together, and reductions of the gradients of one layer, become one call of the coalesced
operator. It moves the same bytes between the same memory, and each gradient's sum is taken in the order in which it was
taken alone, so that results are equal bit for bit.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.accumulate import when_of
from hyper_parallel.graph.collective_groups import group_name, is_collective, is_wait
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.graph.regions import region_of
from hyper_parallel.overlap.jobs import lanes_of
from hyper_parallel.overlap.parameter_collectives import kind_of, reductions, runs
from hyper_parallel.overlap.priority_order import priority_order

_ops = torch.ops._c10d_functional
_COALESCED = {
    _ops.all_gather_into_tensor.default: _ops.all_gather_into_tensor_coalesced.default,
    _ops.reduce_scatter_tensor.default: _ops.reduce_scatter_tensor_coalesced.default,
    _ops.all_reduce.default: _ops.all_reduce_coalesced.default,
}


@dataclass(frozen=True)
class Buckets:
    """The pass."""

    bytes: float = math.inf
    """Most that one call gives; a larger tensor goes alone."""

    name: str = "buckets"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"buckets"})
    conflicts: frozenset[str] = frozenset({SCHEDULE, "buckets"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The graph with fewer collectives."""
        made, _ = step.copied()
        candidates: list[list[fx.Node]] = [list(run.gathers) for run in runs(made)]
        of_layers: dict[object, list[fx.Node]] = defaultdict(list)
        lanes = lanes_of(made)
        for node in reductions(made):
            if region_of(node).layer:  # outside of layers they are far apart, and large
                of_layers[lanes[node], region_of(node).layer].append(node)
        candidates += of_layers.values()
        buckets = [bucket for one in candidates for bucket in self._cut(one)]
        while True:
            try:
                order = _order(made, buckets)
                break
            except GraphError:
                # Reductions of one layer that wait for one another, over two groups in turn: gathers never do.
                kept = [bucket for bucket in buckets if region_of(bucket[0]).phase == "forward"]
                buckets = kept if len(kept) < len(buckets) else []
        return _coalesced(made, buckets, order)

    def _cut(self, nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
        """Those that may be one call, in buckets of at most so many bytes, two calls at least in each."""
        kinds: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if node.target in _COALESCED:
                kinds[when_of(node), *kind_of(node)].append(node)
        found = []
        for alike in kinds.values():
            bucket: list[fx.Node] = []
            size = 0
            for node in alike:
                given = sum(value.bytes for source in node.all_input_nodes for value in values_of(source))
                if not isinstance(given, int):
                    continue
                if bucket and size + given > self.bytes:
                    found.append(bucket)
                    bucket, size = [], 0
                bucket.append(node)
                size += given
            found.append(bucket)
        return [bucket for bucket in found if len(bucket) > 1]


def _order(step: StepGraph, buckets: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes in an order in which each bucket is called at the place of its last member; the others are left out.

    Raises GraphError when there is none.
    """
    instead = {node: bucket[-1] for bucket in buckets for node in bucket}
    needs: dict[fx.Node, set[fx.Node]] = {}
    chains: dict[str, fx.Node] = {}
    for node, before in dependencies(step).items():
        mine = needs.setdefault(instead.get(node, node), set())
        # Which of two collectives comes first is for the new order to say, except of those that are left as they were.
        mine |= {
            instead.get(other, other)
            for other in before
            if not (is_collective(node) and is_collective(other))
        }
        if is_collective(node) and node not in instead:
            group = group_name(node)
            if group in chains:
                mine.add(chains[group])
            chains[group] = node
    for node, before in needs.items():
        before.discard(node)
    left = [node for node in step.nodes if instead.get(node, node) is node]
    waits: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in left:
        if is_wait(node) and begun(node) in instead:
            waits[instead[begun(node)]].add(node)
    place = {node: at for at, node in enumerate(step.nodes)}
    wish = {node: (float(place[node]), place[node]) for node in left}
    # Each wait may bring all results of its call: nothing is done with one before all have been waited for.
    for node in left:
        if is_wait(node) and begun(node) in instead:
            wish[node] = (place[instead[begun(node)]] + 0.5, place[node])
            for user in node.users:
                if user is not step.output:
                    needs[instead.get(user, user)] |= waits[instead[begun(node)]]
    return priority_order(left, needs, wish)


def _coalesced(step: StepGraph, buckets: Sequence[Sequence[fx.Node]], order: Sequence[fx.Node]) -> StepGraph:
    """Exchange each bucket's calls for one, in place."""
    end = step.output
    for node in order:
        end.prepend(node)
    for bucket in buckets:
        first, last = bucket[0], bucket[-1]
        target: Any = first.target
        with step.graph.inserting_before(last):
            call = step.graph.call_function(
                _COALESCED[target], ([node.args[0] for node in bucket], *first.args[1:]), dict(first.kwargs)
            )
        call.meta = dict(last.meta, value=tuple(node.meta["value"] for node in bucket))
        place = call
        for at, node in enumerate(bucket):
            with step.graph.inserting_after(place):
                place = step.graph.call_function(operator.getitem, (call, at))
            place.meta = dict(node.meta)
            node.replace_all_uses_with(place)
        for node in bucket:
            step.graph.erase_node(node)
    return step
