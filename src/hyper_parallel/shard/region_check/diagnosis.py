"""Diagnosis of a refused strategy: modules whose random numbers cannot be repeated, and rules or axes that would pass.

Each candidate is tried before it is named.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import TorchDispatchMode
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import Plan
from hyper_parallel.shard.region_check.outcome import SampleCall, Spread, compared
from hyper_parallel.shard.sharded_model import sharded
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


# Random numbers that no strategy can make the same: found by running a model twice, not by the names of attributes.
#
# Two passes over equal copies, with other states of PyTorch's and Python's generators but the same (seed, step, rows),
# give the same outputs exactly when every draw goes through `shard.dropout`. Where they differ, the operators that drew
# numbers, which PyTorch tags, tell the module.

PASSES = 3


class _Draws(TorchDispatchMode):
    """Notes which modules call operators that draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        """Module to operator."""
        self._stack: list[str] = [""]
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enters(name)))
            self._hooks.append(module.register_forward_hook(self._leaves(), always_call=True))

    def _enters(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._stack.append(name)

        return hook

    def _leaves(self) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._stack.pop()

        return hook

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.found.setdefault(self._stack[-1], str(func.name()).removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator draws from a generator that others share; attention kernels take a rate, which
    may be 0."""
    if kwargs.get("generator") is not None:
        return False
    if "attention" not in func.name():
        return True
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0))


def unrepeatable(template: nn.Module, call: SampleCall, spread: Spread) -> str | None:
    """The modules that draw numbers by the state of a generator, in words; None where nothing does."""
    found: dict[str, str] = {}
    values: list[float] = []
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for at in range(PASSES):
                model = copy.deepcopy(template).train()
                torch.manual_seed(at)
                random.seed(at)
                spread(model, Strategy(check=False))
                draws = _Draws(model)
                try:
                    handle = sharded(model)
                    with (
                        draws,
                        handle.micro_batch(seed=0, step=0, rows=call.rows(handle)),
                        torch.enable_grad(),
                    ):
                        value: Tensor = call.objective(model, handle)
                finally:
                    draws.remove()
                values.append(float(value.detach()))
                found |= draws.found
    finally:
        random.setstate(state)
    if all(value == values[0] or value != value for value in values):
        return None
    named = ", ".join(f"{name!r} ({operator})" for name, operator in sorted(found.items())[:3])
    return named or f"{type(template).__name__!r} (outside of PyTorch's operators)"
