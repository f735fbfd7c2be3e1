"""Captures a micro-batch of a multimodal model, cuts it into encoders and language model, and prices the parts.

Graphs are those that `hp.submodels` would cut: rank-local, on fake tensors, under the axes of the language model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import CaptureError, ConfigError
from hyper_parallel.estimate.stage_price import node_seconds
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dependencies import data_sources
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.partition import part_order
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.program.step_trace import StageMemory
from hyper_parallel.runtime.stage_costs import stage_costs, stage_memory, sum_bytes
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.layer_kinds import layer_kinds, with_layers
from hyper_parallel.shard.model_structure import assigned_modules, submodel_of
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import capture_micro_batch_like, fields_of
from hyper_parallel.step.pipeline_stages import PipelineStages
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.submodel_plan import Cut, Parts
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.axes import read_submodels
from hyper_parallel.workload.submodels import Times

LANGUAGE = "language"
"""The submodel that has all that no encoder has."""
_KEPT = 2
"""Layers of each kind in a capture of few layers."""


@dataclass(frozen=True)
class CapturedParts:
    """The stages of one micro-batch, a part each."""

    names: Sequence[str]
    """The part of each stage, in the order of the data flow."""
    stages: PipelineStages
    prices: Mapping[int, Callable[[fx.Node], float]]
    layer_weights: Mapping[str, float]
    """Decoder layer to how many layers of the model it stands for."""

    def seconds(self, part: str, weight: Callable[[str], float] = lambda module: 1.0) -> Times:
        """Seconds of a part's passes. `weight`: module to how often its operators count."""

        def cost(node: fx.Node) -> float:
            times = weight(str(node.meta.get("module", "")))
            return times * self.prices[id(node.graph)](node) if times else 0.0

        costs, at = stage_costs(self.stages.partition, cost), self.names.index(part)
        return costs.forward[at], costs.input[at], costs.weight[at]

    def layers(self, module: str) -> float:
        """How often a module inside the decoder layers counts; 0 outside."""
        found = (count for name, count in self.layer_weights.items() if f"{module}.".startswith(f"{name}."))
        return next(found, 0.0)

    def memory(self, part: str) -> StageMemory:
        """Bytes of the micro-batch in a part."""
        return stage_memory(self.stages.partition.stages[self.names.index(part)])

    def sent(self, part: str) -> int:
        """Bytes of the values that a part gives to others."""
        return sum_bytes(self.stages.partition.stages[self.names.index(part)].sends)


def captured_parts(
    model: nn.Module,
    micro: MicroBatch,
    cluster: Cluster,
    encoders: Mapping[str, Sequence[str]],
    *,
    tensor: int = 1,
    few_layers: bool = True,
) -> CapturedParts:
    """The parts of a micro-batch of a model on the meta device, in bfloat16 with layers recomputed.

    `encoders`: name to modules. `few_layers`: two decoder layers of each kind stand for all. Raises ConfigError for a
    model that cannot be captured.
    """
    named = read_submodels(
        {**{name: {"modules": tuple(own)} for name, own in encoders.items()}, LANGUAGE: {}}
    )
    with fake_ranks(tensor, 0):
        try:
            recipe, weights = _recipe(model, _strategy(tensor), few_layers)
            whole, _ = capture_micro_batch_like(recipe, micro, 1)
            pipelines = (1,) * len(named)
            parts = Parts(tuple(named), pipelines, submodel_of(assigned_modules(recipe.model, named)))
            order = part_order(whole, parts.part_of, parts.names)
            stages = Cut(parts, order, [()] * len(named), "", 1, whole).stages(whole, recipe)
        except CaptureError as error:
            raise ConfigError(f"model: its step cannot be captured: {error}") from error
        prices = {
            id(stage.step.graph): node_seconds(stage.step, cluster, range(tensor), None)
            for stage in stages.partition.stages
        }
    return CapturedParts([parts.names[part] for part in order], stages, prices, weights)


def inputs_of_modules(
    model: nn.Module, micro: MicroBatch, modules: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Module to the floating-point inputs of the model whose values reach it in the forward pass; none for a module
    that the micro-batch does not need. Raises ConfigError for a model that cannot be captured."""
    of = submodel_of({**{name: at for at, name in enumerate(modules)}, "": len(modules)})
    floating = {name for name, one in fields_of(micro).items() if one.is_floating_point()}
    with fake_ranks(1, 0):
        try:
            recipe, _ = _recipe(model, _strategy(1), few_layers=True)
            step, _ = capture_micro_batch_like(recipe, micro, 1)
        except CaptureError as error:
            raise ConfigError(f"model: its step cannot be captured: {error}") from error
    return _reached(step, of, floating, modules)


def _reached(
    step: StepGraph, of: Callable[[str], int | None], floating: set[str], modules: Sequence[str]
) -> dict[str, frozenset[str]]:
    given = {storage: entry.name for storage, entry in step.outside.items() if entry.name in floating}
    reached: dict[fx.Node, frozenset[str]] = {}
    found: dict[str, frozenset[str]] = dict.fromkeys(modules, frozenset())
    for node, sources in data_sources(step).items():
        own = {given[storage] for storage in touched(node) if storage in given}
        reached[node] = frozenset(own).union(*(reached.get(source, frozenset()) for source in sources))
        part = of(node.meta.get("module", ""))
        if region_of(node).phase != "backward" and part is not None and part < len(modules):
            found[modules[part]] |= {name.removeprefix("micro.") for name in reached[node]}
    return found


def _strategy(tensor: int) -> Strategy:
    given: dict[str, Any] = {
        "version": 1,
        "axes": {"tensor": tensor},
        "precision": {"param": "bfloat16", "compute": "bfloat16"},
        "memory": {"recompute": "layer"},
        "check": False,
    }
    return Strategy.model_validate(given)


def _recipe(
    model: nn.Module, strategy: Strategy, few_layers: bool
) -> tuple[GradientRecipe, dict[str, float]]:
    """A parallelized copy of the model, and how many layers of the model each of its decoder layers stands for."""
    plan = make_plan(model, strategy)
    kinds = layer_kinds(model, plan, strategy)
    weights: dict[str, float] = {}
    if few_layers and kinds:
        kept = {layer: len(alike) / len(alike[:_KEPT]) for alike in kinds for layer in alike[:_KEPT]}
        made, strategy = with_layers(model, plan, strategy, sorted(kept))
        weights = {f"{plan.layers}.{at}": kept[layer] for at, layer in enumerate(sorted(kept))}
    else:
        made = copy.deepcopy(model)
        weights = {f"{plan.layers}.{layer}": 1.0 for alike in kinds for layer in alike}
    parallelize(made, strategy, lowering="traceable")
    return GradientRecipe(made, sharded(made)), weights
