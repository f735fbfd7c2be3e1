"""Gathers of weights and reductions of gradients that run once a step, found in the graph of one micro-batch.

A micro-batch is captured alone, as a step's only one, so that its graph gathers weights and reduces gradients as the
first and the last micro-batch of a step do. The ZeRO level says which of these every micro-batch does:

| `memory.shard` | weights are gathered | gradients are reduced over the shards | and over copies |
|---|---|---|---|
| `parameters` | in each | in each | once |
| `gradients` | once | in each | once |
| `optimizer` | once | once | once |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from hyper_parallel.graph.collective_groups import group_of, is_collective
from hyper_parallel.graph.costs import Pricer
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.regions import region_of
from hyper_parallel.strategy.memory import ShardLevel
from hyper_parallel.workload.work import Work

_CASTS = (torch.ops.aten._to_copy.default,)


@dataclass(frozen=True)
class OnceAStep:
    """The nodes of a micro-batch, or of a stage of one, that run once for all of a step's micro-batches."""

    before: frozenset[fx.Node]
    """That gather and cast weights before the first micro-batch."""
    after: frozenset[fx.Node]
    """That reduce gradients after the last one."""

    def lasting(self, step: StepGraph) -> frozenset[int]:
        """Storages that `before` makes, which stay through the step, and that `after` makes."""
        return frozenset(
            value.storage for node in (*self.before, *self.after) for value in values_of(node)
        ) - frozenset(step.outside)


def once_a_step(step: StepGraph, level: ShardLevel, storages: Collection[str]) -> OnceAStep:
    """What of a micro-batch's graph runs once. `storages`: the axes over which parameters are stored in shards."""
    weights = of_weights(step, list(step.nodes))
    before = (
        frozenset(
            node
            for node in step.nodes
            if region_of(node).phase != "backward" and _makes_weights(step, node, weights)
        )
        if level != "parameters"
        else frozenset[fx.Node]()
    )
    once = {"replicate", *(storages if level == "optimizer" else ())}
    return OnceAStep(before, _reductions(step, once))


def _makes_weights(step: StepGraph, node: fx.Node, weights: set[int]) -> bool:
    made = {value.storage for value in values_of(node)}
    kinds = {storage: entry.kind for storage, entry in step.outside.items()}
    return bool(made) and all(storage in weights or kinds.get(storage) == "parameter" for storage in made)


def _reductions(step: StepGraph, axes: Collection[str]) -> frozenset[fx.Node]:
    """The collectives over these axes that gradients alone need, with what prepares and what follows them."""
    tail: set[fx.Node] = set()
    for node in reversed(list(step.nodes)):
        # Its result goes nowhere but into what a gradient becomes.
        alone = node.users and all(user.op == "output" or user in tail for user in node.users)
        if alone and region_of(node).phase == "backward":
            tail.add(node)
    found: set[fx.Node] = set()
    pricer = Pricer(step, balanced_sizes(step))
    for node in step.nodes:
        if node not in tail:
            continue
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
        elif is_collective(node) and group_of(step, node).axis in axes:
            found.add(node)
            found |= _prepares(node, tail, pricer)
    return frozenset(found)


def _prepares(node: fx.Node, tail: Collection[fx.Node], pricer: Pricer) -> set[fx.Node]:
    """The views and copies that lay a gradient out for its reduction; casts come before the sum over micro-batches."""
    found: set[fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        source = left.pop()
        work = pricer.cost(source) if source in tail and source.target not in _CASTS else None
        if source not in found and isinstance(work, Work) and work.kind in ("view", "copy"):
            found.add(source)
            left += source.all_input_nodes
    return found
