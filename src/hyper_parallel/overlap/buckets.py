"""Bucketing: several small collectives become one, which pays latency once.

Gathers of weights that stand together, and reductions of the gradients of one layer, become one call of the coalesced
operator. It moves the same bytes between the same memory, and each gradient's sum is taken in the order in which it was
taken alone, so that results are equal bit for bit.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.dispatch import once_each
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.accumulate import when_of
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import group_name, is_collective, is_wait
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import begun, is_view, storages_of, writes
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap.jobs import lanes_of

_ops = torch.ops._c10d_functional
_COALESCED = {
    _ops.all_gather_into_tensor.default: _ops.all_gather_into_tensor_coalesced.default,
    _ops.reduce_scatter_tensor.default: _ops.reduce_scatter_tensor_coalesced.default,
    _ops.all_reduce.default: _ops.all_reduce_coalesced.default,
}


@dataclass(frozen=True)
class Buckets:
    bytes: float = math.inf
    """Most that one call gives; a larger tensor goes alone."""

    name: str = "buckets"
    provides: frozenset[str] = frozenset({"buckets"})
    conflicts: frozenset[str] = frozenset({SCHEDULE, "buckets"})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The graph with fewer collectives."""
        copy, _ = step.copied()
        candidates: list[list[fx.Node]] = [list(run.gathers) for run in runs(copy)]
        of_layers: dict[object, list[fx.Node]] = defaultdict(list)
        lanes = lanes_of(copy)
        for node in reductions(copy):
            if region_of(node).layer:  # outside of layers they are far apart, and large
                of_layers[lanes[node], region_of(node).layer].append(node)
        candidates += of_layers.values()
        buckets = [bucket for one in candidates for bucket in self._cut(one)]
        while True:
            try:
                order = _order(copy, buckets)
                break
            except GraphError:
                # Reductions of one layer that wait for one another, over two groups in turn: gathers never do.
                kept = [bucket for bucket in buckets if region_of(bucket[0]).phase == "forward"]
                buckets = kept if len(kept) < len(buckets) else []
        return _coalesced(copy, buckets, order)

    def _cut(self, nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
        """Collectives that may be one call, in buckets of limited size, two calls at least in each."""
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


# Collectives that serve parameters: weight gathers and gradient reductions.
#
# A weight is gathered before it is used, and nothing but parameters goes into that, so that a gather may begin at any
# time. A gradient is reduced, and nothing but the update needs the result, so that it may be waited for late.


@dataclass(frozen=True)
class Run:
    """Gathers that stand together: those of a layer, as a rule."""

    asks: tuple[fx.Node, ...]
    """What comes before them and their beginnings: casts, views, collectives."""
    gathers: tuple[fx.Node, ...]
    """The collectives among `asks`."""
    waits: tuple[fx.Node, ...]


def runs(step: StepGraph) -> list[Run]:
    """The gathers of weights, in order; nothing is computed from anything but weights between those of one run."""
    nodes = list(step.nodes)
    weights = of_weights(step, nodes)
    found: list[Run] = []
    asks: dict[fx.Node, None] = {}
    later: set[fx.Node] = set()
    waits: list[fx.Node] = []

    def close() -> None:
        gathers = tuple(node for node in asks if is_collective(node))
        if gathers:
            found.append(Run(tuple(asks), gathers, tuple(waits)))
        asks.clear()
        waits.clear()
        later.clear()

    for node in nodes:
        if not _made_of(node, weights):
            if not is_view(node):
                close()
        elif is_wait(node) and begun(node) in asks:
            waits.append(node)
            later.add(node)
        elif later.intersection(node.all_input_nodes):
            later.add(node)
        else:
            asks[node] = None
    close()
    return found


def reductions(step: StepGraph) -> list[fx.Node]:
    """The collectives of the backward pass whose results no product of it needs, in order."""
    needed: set[fx.Node] = set()
    for node in reversed(list(step.nodes)):
        if region_of(node).phase not in ("forward", "loss", "backward"):
            continue
        if _multiplies(node.target) or any(user in needed for user in node.users):
            needed.add(node)
    return [
        node
        for node in step.nodes
        if _is_reduction(node) and region_of(node).phase == "backward" and node not in needed
    ]


def kind_of(node: fx.Node) -> tuple[object, ...]:
    """Properties that two collectives must share to be made one: operator, group, other arguments, dtype, pass and
    micro-batch."""
    (value,) = values_of(node)
    return (
        node.target,
        group_name(node),
        *(arg for arg in node.args if not isinstance(arg, fx.Node)),
        value.dtype,
        region_of(node).phase,
        node.meta["recomputed"],
    )


def _made_of(node: fx.Node, weights: set[int]) -> bool:
    storages = storages_of([node])
    return (
        bool(storages)
        and storages <= weights
        and not (writes(node) and not is_wait(node))
        and node.target is not HOST
    )


def _is_reduction(node: fx.Node) -> bool:
    return is_collective(node) and _reduces(node.target)


@once_each
def _reduces(target: Any) -> bool:
    return "reduce" in str(target)


@once_each
def _multiplies(target: Any) -> bool:
    return any(part in str(target) for part in ("mm", "bmm", "addmm", "attention", "conv"))


def priority_order(
    nodes: Sequence[fx.Node],
    needs: Mapping[fx.Node, set[fx.Node]],
    wish: Mapping[fx.Node, Any] | None = None,
) -> list[fx.Node]:
    """`nodes` after what each needs, and otherwise in the order of `wish`: (place, then), or as they stand.

    A wish is compared with the places of the others, so that (4.5, 0) is between the nodes 4 and 5. Raises GraphError
    when nodes need each other.
    """
    wish = wish or {}
    place = {node: wish.get(node, (float(at), at)) for at, node in enumerate(nodes)}
    number = {node: at for at, node in enumerate(nodes)}
    left = {node: len(needs[node]) for node in nodes}
    then: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for other in needs[node]:
            then[other].append(node)
    ready = [(place[node], number[node], node) for node in nodes if not left[node]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for other in then[node]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (place[other], number[other], other))
    if len(order) < len(nodes):
        stuck = next(node for node in nodes if left[node])
        raise GraphError(
            f"{stuck} ({stuck.target}) and {len(nodes) - len(order) - 1} more nodes need each other"
        )
    return order
