"""One forward and backward pass of a reduced model, on one device or on simulated ranks, with whole gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hyper_parallel.compat import suspended_groups
from hyper_parallel.compat.float64 import float64
from hyper_parallel.compat.local_tensor import agreed, on_rank, one_device, simulated_ranks
from hyper_parallel.shard.region_check.sample_inputs import SampleCall
from hyper_parallel.shard.sharded_model import LOSS_AXES, ShardedModel, sharded
from hyper_parallel.strategy import Strategy

Spread = Callable[[nn.Module, Strategy], nn.Module]
"""Puts a strategy into effect on a model, with gathers that simulated ranks can run."""

TOLERANCE = 1e-5
"""Of a gradient's largest element, at least 1e-4 of the gradient's norm. Another order of the same sum rounds by 6e-8
an addition in float32; a term that is missing or counted twice shows as 1e-2 and more."""
PRECISE = 1e-8
"""The same in float64, where an addition rounds by 1e-16."""
COARSE = 1e-3
"""The same where float32 rounds too much and the model cannot be computed in float64."""


@dataclass(frozen=True)
class Outcome:
    """The objective, every parameter's whole gradient and what the pass wrote, on the CPU."""

    objective: float
    gradients: dict[str, Tensor]
    written: dict[str, Tensor] = field(default_factory=dict)
    """The weights and buffers that have other values after the pass than before it."""

    def written_weight(self, model: nn.Module) -> str:
        """The first weight of the model that the pass wrote; empty where it wrote none."""
        return next((name for name, _ in model.named_parameters() if name in self.written), "")


@dataclass(frozen=True)
class Mismatch:
    """The tensor that differs most."""

    tensor: str
    error: float
    """Over the tensor's largest element; infinite where one side has none, NaN where ranks do not agree."""

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"ranks hold different gradients of {self.tensor}"
        if math.isinf(self.error):
            return f"only one side has {self.tensor}"
        return f"{self.tensor} is off by {self.error:.1e} of its largest element"


def run(
    template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread, *, precise: bool = False
) -> Outcome:
    """One pass of a copy of `template` (with values, on the CPU) under a strategy, in float32 or, `precise`, float64.

    Raises what the model raises.
    """
    with _ranks(strategy.axes.world), float64() if precise else contextlib.nullcontext():
        with one_device():
            model = copy.deepcopy(template).to(torch.float64 if precise else torch.float32).train()
        spread(model, strategy)
        handle = sharded(model)
        with handle.micro_batch(seed=0, step=0, rows=call.rows(handle)):
            part = call.objective(model, handle)
            part.backward()
        total = handle.all_reduce(part.detach(), LOSS_AXES)
        gradients = {
            p.name: agreed(handle.gather(p.grad, p.layout)) for p in handle.parameters() if p.grad is not None
        }
        return Outcome(float(on_rank(total, 0)), gradients, _written(template, handle))


def _written(template: nn.Module, handle: ShardedModel) -> dict[str, Tensor]:
    after = {p.name: agreed(handle.gather(p.local, p.layout)) for p in handle.parameters()}
    after |= {name: agreed(buffer) for name, buffer in handle.model.named_buffers()}
    with one_device():
        before = dict([*template.named_parameters(), *template.named_buffers()])
        return {
            name: value
            for name, value in after.items()
            if name in before and not torch.equal(value, before[name].detach().to(value))
        }


def worst(whole: Outcome, split: Outcome) -> Mismatch:
    """What differs most between two outcomes of the same values."""
    for name in whole.written.keys() | split.written.keys():
        one, many = whole.written.get(name), split.written.get(name)
        if one is None or many is None or one.shape != many.shape:
            return Mismatch(f"what the forward pass writes to {name}", math.inf)
        scale = max(float(one.abs().max()), 1e-30) if one.numel() else 1.0
        off = float((one.double() - many.double()).abs().max()) / scale if one.numel() else 0.0
        if not off <= TOLERANCE:
            return Mismatch(f"what the forward pass writes to {name}", off)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.gradients.values()))
    scale = max(abs(whole.objective), 1e-3)
    found = [Mismatch("the objective", abs(whole.objective - split.objective) / scale)]
    for name in whole.gradients | split.gradients:
        one, many = whole.gradients.get(name), split.gradients.get(name)
        if one is None or many is None:
            # What nothing reaches may have a gradient of zeros, or none.
            other = many if one is None else one
            assert other is not None
            found.append(Mismatch(f"a gradient of {name}", math.inf if bool(other.any()) else 0.0))
            continue
        largest = max(float(one.abs().max()) if one.numel() else 0.0, 1e-4 * norm, 1e-30)
        found.append(
            Mismatch(
                name, float((one.double() - many.double()).abs().max()) / largest if one.numel() else 0.0
            )
        )
    return max(found, key=lambda m: math.inf if math.isnan(m.error) else m.error)


def compared(template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread) -> Mismatch | None:
    """What is wrong under a strategy; None where it computes what one device computes.

    float32 first; where it differs by more than `TOLERANCE`, float64 decides.
    """
    alone = Strategy(check=False)
    found = worst(run(template, alone, call, spread), run(template, strategy, call, spread))
    if found.error <= TOLERANCE:
        return None
    try:
        precise = worst(
            run(template, alone, call, spread, precise=True),
            run(template, strategy, call, spread, precise=True),
        )
    # Kernels that know no float64.
    except (RuntimeError, TypeError, ValueError):
        return None if found.error <= COARSE else found
    return None if precise.error <= PRECISE else precise


@contextlib.contextmanager
def _ranks(world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    with suspended_groups.set_aside(), simulated_ranks(world):
        yield
