"""Rehearsal: a small copy trains one step on the real workers, in the lowering that training will run.

Simulated ranks cannot run FSDP2. So a module whose calls are not known before the first one is copied when it is first
called, every rank computes the call that it has on one device, and the sum of these gradients is held against what the
strategy gives. What fails there fails before anything is trained, in one line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hyper_parallel.compat import collectives
from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.region_check import result_cache
from hyper_parallel.shard.region_check.check import SKIP, agreed_verdict, checks, quiet
from hyper_parallel.shard.region_check.outcome import COARSE, Outcome, SeenCall, Spread, worst
from hyper_parallel.shard.region_check.reduced_model import SMALL, copy_of_module, fill
from hyper_parallel.shard.sharded_model import ROW_AXES, ShardedModel, sharded
from hyper_parallel.strategy import Strategy

Real = Callable[[nn.Module, Strategy], nn.Module]
"""Puts a strategy into effect on a copy, over the process groups of the model."""


def rehearse(handle: ShardedModel, alone: Spread, real: Real, original: nn.Module, call: SeenCall) -> None:
    """Train a copy of `original` for a step on this rank's call. A collective. Raises StrategyError."""
    axes = handle.strategy.axes
    small = sum(p.numel() for p in original.parameters()) <= SMALL
    if not (checks(handle.strategy) and small) or axes.context > 1 or collectives.device_type() != "cpu":
        return
    strategy = handle.strategy.model_copy(update={"check": False, "precision": Strategy().precision})
    key = result_cache.digest(original, strategy, call) + "-rehearsal"
    if agreed_verdict(lambda: result_cache.passed(key)):
        return
    with quiet():
        template = copy_of_module(original)
        fill(template)
        for name, module in original.named_modules():
            template.get_submodule(name).training = module.training
        whole = _on_one_device(handle, template, alone, call)
        if whole is None:
            return
        wrong = _wrong(whole, template, lambda model: real(model, strategy), call)
    if wrong:
        raise StrategyError(f"{wrong} ({SKIP})")
    result_cache.keep(key, "a copy was trained for a step on real workers: right")


def _on_one_device(
    handle: ShardedModel, template: nn.Module, alone: Spread, call: SeenCall
) -> Outcome | None:
    """The gradients of every rank's call, summed; None where the copy does not run. A collective."""
    found: Outcome | None = None
    try:
        model = alone(copy.deepcopy(template), Strategy(check=False))
        found = _gradients(model, call, 1 / handle.strategy.axes.data)
    # Whatever the user's code raises on random weights.
    except Exception:
        found = None
    ran = torch.tensor([float(found is not None)])
    if not float(-handle.all_reduce(-ran, handle.mesh.names, "max")):
        return None
    assert found is not None
    summed: dict[str, Tensor] = {}
    for name, parameter in template.named_parameters():
        mine = found.gradients.get(name)
        has = torch.tensor([float(mine is not None)])
        if float(handle.all_reduce(has, handle.mesh.names, "max")):
            summed[name] = handle.all_reduce(torch.zeros_like(parameter) if mine is None else mine, ROW_AXES)
    return Outcome(0.0, summed)


def _wrong(
    whole: Outcome, template: nn.Module, real: Callable[[nn.Module], nn.Module], call: SeenCall
) -> str:
    """What is wrong on the real workers, in words; empty where nothing is. A collective."""
    name = type(template).__name__
    try:
        model = real(copy.deepcopy(template))
    except HyperParallelError:
        return ""  # of patterns that mean what a copy has not
    try:
        found = worst(whole, _gradients(model, call, 1.0))
    except HyperParallelError as refusal:
        return str(refusal)
    except Exception as error:
        return (
            f"this strategy on {name} fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    return (
        ""
        if found.error <= COARSE
        else f"this strategy on {name} gives other gradients than one device: {found}"
    )


def _gradients(model: nn.Module, call: SeenCall, scale: float) -> Outcome:
    """The whole gradients of a model that is parallelized."""
    handle, draw = sharded(model), current_step().draw
    rows = call.rows(handle) if draw is None else draw.rows
    with handle.micro_batch(seed=0, step=0, rows=rows):
        (call.objective(model, handle) * scale).backward()
    with torch.no_grad():
        gradients = {
            p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None
        }
    return Outcome(0.0, {name: gradient.detach().clone() for name, gradient in gradients.items()})
