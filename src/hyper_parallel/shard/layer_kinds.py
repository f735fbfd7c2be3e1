"""Decoder layers by kind under a strategy, and copies of a model with few of its layers.

Two layers are of one kind if they are alike as modules (`graph.alike_layers`), each config's list with an entry for
every layer says the same of both, the plan and the dtypes are the same, and both or neither are recomputed. What one
layer of each kind costs, or looks like as a graph, is found once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.graph.alike_layers import kinds
from hyper_parallel.shard.fsdp_units import frees_after_forward, separately_gathered
from hyper_parallel.shard.model_structure import text_config
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.precision import compute_dtypes
from hyper_parallel.shard.rules import matching
from hyper_parallel.strategy import Strategy, recomputed_layers


def layer_kinds(model: nn.Module, plan: Plan, strategy: Strategy) -> list[list[int]]:
    """The indices of the decoder layers by kind, in order of each kind's first layer; empty without layers."""
    layers = layers_in(model, plan)
    if layers is None:
        return []
    dtypes = compute_dtypes(model, strategy.precision)
    frees = frees_after_forward(strategy.memory, separately_gathered(model, plan, dtypes))
    per_layer = _per_layer(text_config(model), len(layers))
    again = set(recomputed_layers(strategy.memory, [len(layers)]))

    def more(index: int) -> dict[str, str]:
        settings = {f"config {key}": repr(values[index]) for key, values in per_layer.items()}
        settings["recomputed"] = str(index in again)
        return {**settings, **_placement(f"{plan.layers}.{index}", layers[index], plan, dtypes, frees)}

    return kinds(layers, more)


def layers_in(model: nn.Module, plan: Plan) -> nn.ModuleList | None:
    """The decoder layers that the plan found."""
    if plan.layers is None:
        return None
    layers = model.get_submodule(plan.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def with_layers(
    model: nn.Module, plan: Plan, strategy: Strategy, keep: Sequence[int]
) -> tuple[nn.Module, Strategy]:
    """A copy of the model with only the layers `keep`, ascending, and the strategy with rules for their new names.

    The config of a Transformers model is adapted: the number of layers, and each list with one entry per layer.
    """
    layers, name = layers_in(model, plan), plan.layers
    assert layers is not None
    assert name is not None
    parent_name, _, own = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    try:
        setattr(parent, own, nn.ModuleList(layers[index] for index in keep))
        made = copy.deepcopy(model)
    finally:
        setattr(parent, own, layers)
    config: Any = text_config(made)
    if config is not None:
        for key, values in _per_layer(config, len(layers)).items():
            setattr(config, key, [values[index] for index in keep])
        config.num_hidden_layers = len(keep)
    return made, _renamed(model, plan, strategy, keep)


def _renamed(model: nn.Module, plan: Plan, strategy: Strategy, keep: Sequence[int]) -> Strategy:
    """Patterns written out for the modules they match, by the names that these have in the smaller model."""
    new = {f"{plan.layers}.{old}": f"{plan.layers}.{at}" for at, old in enumerate(keep)}
    names = [name for name, _ in model.named_modules()]
    owners = [name for name, m in model.named_modules() if any(p is not None for p in m._parameters.values())]

    def renamed(name: str) -> str | None:
        for prefix in new:
            if name == prefix or name.startswith(f"{prefix}."):
                return new[prefix] + name[len(prefix) :]
        return None if name.startswith(f"{plan.layers}.") else name

    def written_out(patterns: Mapping[str, Any], among: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pattern, value in patterns.items():
            for name in matching(pattern, among):
                known = renamed(name)
                if known is not None:
                    # Of several patterns that match, the last holds: its place is the last too.
                    found.pop(known, None)
                    found[known] = value
        return found

    precision = strategy.precision.model_copy(
        update={"modules": written_out(strategy.precision.modules, names)}
    )
    changed: dict[str, Any] = {
        "rules": written_out(strategy.rules, owners),
        "precision": precision,
        "expert_replicas": written_out(strategy.expert_replicas, names),
    }
    memory: dict[str, Any] = {}
    if isinstance(strategy.memory.recompute_layers, int):
        # The first layers of the model are recomputed, and so the first of those that are kept.
        count = sum(layer < strategy.memory.recompute_layers for layer in keep)
        memory |= {"recompute_layers": count} if count else {"recompute": "none", "recompute_layers": None}
    if isinstance(strategy.memory.reshard_after_forward, dict):
        apart = separately_gathered(model, plan, compute_dtypes(model, strategy.precision))
        frees = frees_after_forward(strategy.memory, apart)
        by_name = {known: free for name, free in frees.items() if (known := renamed(name)) is not None}
        memory["reshard_after_forward"] = by_name
    changed["memory"] = strategy.memory.model_copy(update=memory)
    return strategy.model_copy(update=changed)


def _placement(
    name: str,
    layer: nn.Module,
    plan: Plan,
    dtypes: Mapping[str, torch.dtype],
    frees: Mapping[str, bool],
) -> dict[str, str]:
    """How a strategy places a layer and computes it."""
    found: dict[str, str] = {}
    for path, module in layer.named_modules():
        full = f"{name}.{path}" if path else name
        planned = (plan.modules.get(full), plan.regions.get(full), plan.experts.get(full), frees.get(full))
        # A plan names other modules of its layer, which stand at the same place in each.
        found[f"{path}:plan"] = repr((dtypes[full], *planned, *_listed(full, plan))).replace(f"{name}.", "")
        for own in module._parameters:
            known = plan.parameters.get(f"{full}.{own}")
            if known is not None:
                found[f"{path}:{own}:plan"] = f"{known.layout} {known.storage} {known.summed} {known.chosen}"
    return found


def _listed(name: str, plan: Plan) -> list[Any]:
    """What the parts of a plan say of a module that list modules."""
    found: list[Any] = [name in plan.whole]
    if plan.context is not None:
        found.append(name in plan.context.attentions)
    if plan.tensor2d is not None:
        two = plan.tensor2d
        found += [two.attentions.get(name), two.mlps.get(name), two.norms.get(name), name in two.swapped]
    return found


def _per_layer(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """The config's lists with an entry for every layer."""
    if config is None:
        return {}
    return {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
