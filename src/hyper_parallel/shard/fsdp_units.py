"""FSDP units: which modules are gathered together, and which are resharded after the forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan.types import Plan
from hyper_parallel.shard.rules import matching
from hyper_parallel.strategy.memory import Memory


def separately_gathered(model: nn.Module, plan: Plan, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Module name to the axis of its storage, of the modules that FSDP2 gathers each by itself; inner ones first.

    They are the decoder layers, and inside and outside of these the modules whose weights are stored over other axes
    or computed with in another dtype than the model's. What is left goes with the model's root; so does a layer that
    shares a weight with modules outside of it (Zamba), since FSDP2 keeps a weight one only inside of a group.
    """
    plans = {id(p): plan.parameters[name] for name, p in model.named_parameters()}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        storages = {plans[id(p)].storage for p in module._parameters.values() if p is not None}
        if name and storages and (dtypes[name] != dtypes[""] or storages != {plan.mesh.storage}):
            assert len(storages) == 1, f"{name} has weights stored over {storages}"
            found[name] = storages.pop()
    if plan.layers is not None:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for index, layer in model.get_submodule(plan.layers).named_children():
            inside = Counter(id(p) for _, p in layer.named_parameters(remove_duplicate=False))
            if all(uses[parameter] == count for parameter, count in inside.items()):
                found.setdefault(f"{plan.layers}.{index}", plan.mesh.storage)
    return found


def frees_after_forward(memory: Memory, gathered: Iterable[str]) -> dict[str, bool]:
    """Module name to whether its gathered parameters are freed after its forward pass, of `separately_gathered`.

    Raises StrategyError when a pattern of memory.reshard_after_forward matches none of them.
    """
    names, given = list(gathered), memory.reshard_after_forward
    if not isinstance(given, dict):
        return dict.fromkeys(names, memory.shard == "parameters" and given is not False)
    found = dict.fromkeys(names, memory.shard == "parameters")
    for pattern, frees in given.items():
        matched = matching(pattern, names)
        if not matched:
            raise StrategyError(
                f"strategy.memory.reshard_after_forward: the pattern {pattern!r} matches no module that is gathered "
                f"by itself; these are {', '.join(names[:3]) or 'none'}{', …' if len(names) > 3 else ''}"
            )
        found.update(dict.fromkeys(matched, frees))
    return found
