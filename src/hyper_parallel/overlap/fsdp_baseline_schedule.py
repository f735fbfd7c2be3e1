"""Baseline schedule of FSDP-style trainers: prefetch one layer ahead, reduce behind the next layer.

- Weights of one run (a layer) are asked for while the one before it computes, as FSDP2 does by default.
- Gradients of a layer are reduced while the next layer's backward pass computes, and waited for after it.
- Every other collective, of tensor, sequence, context and expert parallelism, is waited for where it begins.
- Micro-batches run one after the other.

`layered` does that with what a layer gathers, and what it reduces, each in one call, as FSDP2 does too.
"""

from __future__ import annotations

import itertools

from torch import fx

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dependencies import dependencies, reorder
from hyper_parallel.graph.ir import group_name, is_collective, is_wait
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.pass_manager import SCHEDULE, Rewrite
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap.buckets import Buckets, priority_order, reductions, runs


class FsdpBaseline:
    """The pass; only the order of the nodes changes."""

    name = "usual"
    provides = frozenset({SCHEDULE})
    conflicts = frozenset({SCHEDULE})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The same nodes in the usual order."""
        nodes = list(step.nodes)
        place = {node: at for at, node in enumerate(nodes)}
        wish: dict[fx.Node, tuple[float, int]] = {}
        free = [node for node in nodes if is_collective(node)]
        found = runs(step)
        for before, run in itertools.pairwise(found):
            ahead = min((place[wait] for wait in before.waits), default=place[before.asks[-1]]) - 0.5
            wish.update((node, (ahead, place[node])) for node in run.asks)
        end = next((place[node] for node in nodes if region_of(node).phase == "clip"), len(nodes))
        begins = reductions(step)
        until: dict[fx.Node, float] = {}
        behind: dict[str, tuple[str, float]] = {}
        """Of each group the layer and the place of the reduction that comes next."""
        other: dict[str, float] = {}
        """Of each group the place of the first one of another layer."""
        for node in reversed(begins):
            group, layer = group_name(node), region_of(node).layer
            if group in behind and behind[group][0] != layer:
                other[group] = behind[group][1]
            behind[group] = (layer, place[node])
            until[node] = other[group] + 0.5 if group in other else end - 0.5
        for node in nodes:
            if is_wait(node) and begun(node) in until:
                wish[node] = (until[begun(node)], place[node])
        needs = dependencies(step, free)
        return reorder(step, priority_order(nodes, needs, wish), free, needs)


def _layered(step: StepGraph) -> StepGraph:
    return FsdpBaseline()(Buckets()(step))


layered = Rewrite("layered", _layered, provides=frozenset({SCHEDULE}), conflicts=frozenset({SCHEDULE}))
"""The pass that `train` takes where nothing is simulated."""
