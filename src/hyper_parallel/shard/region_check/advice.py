"""Advice for a refused strategy: each candidate is tried before it is named."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.region_check.outcome import Spread, compared
from hyper_parallel.shard.region_check.sample_inputs import SampleCall
from hyper_parallel.strategy import Strategy, recomputes


def regions_of(plan: Plan) -> list[str]:
    """Patterns of the modules whose projections are split, one for each kind: ``model.layers.*.mlp``."""
    parents = dict.fromkeys(
        _pattern(name.rpartition(".")[0] if module.rule in ("colwise", "rowwise", "shared") else name, plan)
        for name, module in plan.modules.items()
    )
    return [pattern for pattern in parents if pattern]


def rules_that_pass(
    template: nn.Module, strategy: Strategy, plan: Plan, call: SampleCall, spread: Spread
) -> dict[str, str] | None:
    """The fewest regions left whole with which the strategy computes what one device computes; None where none is
    found. Each is tried by itself, then all together and one after the other taken back."""
    regions = regions_of(plan)

    def passes(chosen: list[str]) -> bool:
        rules = dict(strategy.rules) | {rule: "replicate" for one in chosen for rule in _rules(one, plan)}
        try:
            return compared(template, strategy.model_copy(update={"rules": rules}), call, spread) is None
        except StrategyError:
            return False
        # What fails with other rules is no advice.
        except Exception:
            return False

    for one in regions:
        if passes([one]):
            return dict.fromkeys(_rules(one, plan), "replicate")
    if len(regions) < 2 or not passes(regions):
        return None
    chosen = list(regions)
    for one in regions:
        fewer = [other for other in chosen if other != one]
        if fewer and passes(fewer):
            chosen = fewer
    return {rule: "replicate" for one in chosen for rule in _rules(one, plan)}


def right_without_recompute(
    template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread
) -> bool:
    """Whether the strategy, which is wrong, recomputes layers and is right where it does not."""
    if not recomputes(strategy.memory):
        return False
    memory = strategy.memory.model_copy(update={"recompute": "none", "recompute_layers": None})
    try:
        return compared(template, strategy.model_copy(update={"memory": memory}), call, spread) is None
    # What fails without it as well is no advice.
    except Exception:
        return False


def without_axes(template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread) -> Iterator[str]:
    """Axes without which the strategy is right."""
    for axis in ("context", "expert", "tensor_y", "tensor_x"):
        degree = strategy.axes.degree(axis)
        if degree == 1:
            continue
        axes = {name: strategy.axes.degree(name) for name in strategy.axes.order} | {
            "expert": strategy.axes.expert
        }
        axes[axis] = 1
        if axis == "tensor_x" and axes["tensor_y"] == 1:
            changed = {"sequence": False, "memory": strategy.memory.model_copy(update={"gathered": "keep"})}
        else:
            changed = {}
        try:
            smaller = Strategy(**{**strategy.model_dump(), **changed, "axes": axes, "check": False})
            if smaller.axes.world == 1 or compared(template, smaller, call, spread) is None:
                yield "tensor" if axis == "tensor_x" and axes["tensor_y"] == 1 else axis
        # What fails on fewer axes is no advice.
        except Exception:
            continue


def _pattern(name: str, plan: Plan) -> str:
    if plan.layers and name.startswith(f"{plan.layers}."):
        return re.sub(rf"^{re.escape(plan.layers)}\.\d+", f"{plan.layers}.*", name)
    return name


def _rules(region: str, plan: Plan) -> list[str]:
    """The patterns of `strategy.rules` that mean a region's split modules."""
    own = [
        _pattern(name, plan)
        for name, module in plan.modules.items()
        if _pattern(name.rpartition(".")[0], plan) == region
        and module.rule in ("colwise", "rowwise", "shared")
    ]
    return list(dict.fromkeys(own)) or [region]
