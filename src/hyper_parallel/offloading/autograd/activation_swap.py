"""Activation swap: a budget just large enough when idle activations are offloaded.

    without(k) = live bytes at node k − Σ bytes of activations that no node uses at k
    budget = max_k without(k) + 2 · the activations of the layer that keeps most

An activation is made in the forward pass and used in the backward pass. The last term is room for those of a layer that
are on their way out, and for those of another that come back, so that copies run beside the computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.regions import region_of
from hyper_parallel.offloading.schedule.problem import Buffer, Problem
from hyper_parallel.trace.live_bytes import profile

AHEAD = 2
"""Layers whose activations are on their way."""


@dataclass(frozen=True)
class Swap:
    """In the place of a budget: as much as the passes need with their activations away."""

    inputs: bool = True
    """What layers are given may be away too; else there is room for it."""
    layers: str | None = None
    """Name of the module whose children are the layers; None where it is not known, and modules are taken for them."""

    def budget(self, step: StepGraph, problem: Problem) -> int:
        """Bytes of the device for a step whose memory `problem` tells."""
        activations = [held for held in problem.held if held.kind == "activation"]
        by_layer: dict[str, int] = defaultdict(int)
        for held in activations:
            by_layer[self._layer(held.name)] += held.bytes
        room = AHEAD * max((count for layer, count in by_layer.items() if layer), default=0)
        staying = frozenset[int]() if self.inputs else self._given(step)
        away = _away([held for held in activations if held.storage not in staying], problem.nodes)
        return room + max(
            (live - gone for live, gone in zip(problem.profile(), away, strict=True)), default=0
        )

    def _given(self, step: StepGraph) -> frozenset[int]:
        """The storages that one layer makes, or none, and another one uses in the forward pass."""
        layers: Mapping[int, set[str]] = defaultdict(set)
        for node in step.nodes:
            if region_of(node).phase != "backward":
                for storage in touched(node) | {value.storage for value in values_of(node)}:
                    layers[storage].add(self._layer(node.meta["module"]))
        return frozenset(storage for storage, of in layers.items() if len(of) > 1)

    def _layer(self, module: str) -> str:
        """The layer that a module is in, the module itself where layers are not known, else the empty string."""
        if self.layers is None:
            return module
        inside = f"{self.layers}."
        return inside + module[len(inside) :].partition(".")[0] if module.startswith(inside) else ""


def _away(leaving: list[Buffer], nodes: int) -> list[int]:
    """Bytes of these storages that are alive and in no use, at each node."""
    return profile(
        (
            (before.last + 1, after.first, held.bytes)
            for held in leaving
            for before, after in pairwise(held.busy)
        ),
        nodes,
    )
