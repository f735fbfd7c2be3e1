"""Recipe of a training step, shared by both engines, and the control values that ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import DataError
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.experts.loads import imbalance, take_loads
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES, ROW_AXES
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.lr_schedule import Schedule, schedule
from hyper_parallel.step.nonfinite_report import shorten
from hyper_parallel.step.optimizer import Optimizer, build_optimizer


class ControlVector(NamedTuple):
    """What a rank says in a step, in the order of the tensor that says it; what is yes or no is 1 or 0."""

    next_tokens: float
    """Valid tokens of the next batch."""
    stop: float
    """It was asked to stop."""
    memory: float
    """Bytes that it holds."""
    graph_ends: float
    """It has no graph for the next batch."""
    links_changed: float
    """Links are not what its plan takes them to be."""
    save: float
    """It wants a checkpoint."""


CONTROL_VECTOR = len(ControlVector._fields)


class StepSums(NamedTuple):
    """What a step came to over all ranks, in the order of the tensor that `Recipe.summed` gives."""

    loss: float
    said: ControlVector
    norm: float
    tokens: float
    """Valid tokens of the step."""
    imbalance: float
    """0 without experts."""

    @classmethod
    def of(cls, values: Tensor) -> StepSums:
        """Read from fp32 [10]; the host waits for the device."""
        loss, *said, norm, tokens, imbalance = values.tolist()
        return cls(loss, ControlVector(*said), norm, tokens, imbalance)


@dataclass(frozen=True)
class StepResult:
    """What a step came to, equal on every rank. Nothing here is on the device, where a memory budget would not know of
    it."""

    loss: float
    grad_norm: float
    """The global 2-norm before clipping."""
    tokens: int
    """Valid tokens: those that bear loss."""
    next_tokens: float
    """Those of the next batch."""
    stop: bool
    """Some rank was asked to stop."""
    memory: float
    """Sum over the ranks of what each said that it holds, in bytes."""
    graph_ends: bool = False
    """Some rank has no graph for its next batch, so that all go on eagerly."""
    links_changed: bool = False
    """Some rank's links are not what its plan takes them to be, so that all plan anew."""
    save: bool = False
    """Some rank wants a checkpoint after this step."""
    expert_imbalance: float | None = None
    """The largest ratio, over the layers, of the busiest expert's load to the mean; None without experts."""
    expert_loads: list[float] | None = None
    """The rows that each expert of each layer got in the whole step; None without experts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else a loss of another kind came to."""

    @property
    def finite(self) -> bool:
        """Whether there is something to update with."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class GradientRecipe:
    """Loss and gradients of a step, without its batch and its update."""

    model: nn.Module
    handle: ShardedModel
    seed: int = field(default=0, kw_only=True)
    loss: LossConfig | None = field(default=None, kw_only=True)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of fp32 tensors [B, S] that the loss takes besides labels: in `MicroBatch.extra`."""
        return ()

    def loss_of(
        self,
        model: nn.Module,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None,
        tokens: Tensor,
        options: LossConfig | None = None,
        *,
        micro_batches: int = 1,
        **inputs: Any,
    ) -> Tensor:
        """A micro-batch's part of the step's loss, as of `causal_lm_loss`, with gradients."""
        return causal_lm_loss(
            model, input_ids, labels, position_ids, tokens, options, micro_batches=micro_batches, **inputs
        )

    def sums(self) -> Mapping[str, Tensor]:
        """What the micro-batches since the last `forget` add up to besides the loss, by name. It is the same tensors
        until the next micro-batch: a graph is cut at them."""
        return {}

    def forget(self) -> None:
        """A step begins: nothing was added up."""


MakeOptimizer = Callable[[nn.Module, Any], Optimizer]
"""(the parallelized model, `train.optimizer`) to its optimizer."""


@dataclass(frozen=True)
class Recipe(GradientRecipe):
    """A step without its batch."""

    optimizer: Optimizer
    schedule: Schedule
    clip: float | None = None
    """Largest global gradient norm; None does not clip."""
    router_bias_rate: float = 0.0

    @classmethod
    def of(
        cls, config: RunConfig, model: nn.Module, make_optimizer: MakeOptimizer = build_optimizer
    ) -> Recipe:
        """The step of a run, on a model that was parallelized; its optimizer begins anew."""
        train = config.train
        return cls(
            model,
            sharded(model),
            make_optimizer(model, train.optimizer),
            schedule(train.schedule, train.steps),
            seed=config.seed,
            clip=train.clip,
            loss=train.loss,
            router_bias_rate=train.router_bias_rate,
        )

    def tokens(self, batch: StepBatch) -> Tensor:
        """Valid tokens of a step over all ranks: zero-dim fp32. A collective."""
        return self.handle.all_reduce(
            batch.tokens * self.handle.axes.speaks(ROW_AXES, self.handle.rank), self.handle.mesh.names
        )

    def summed(self, loss: Tensor, norm: Tensor, tokens: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """(fp32 [10], the `StepSums` for `result`; each expert's load) from this rank's part of the loss, and what it
        says, fp32 [6].

        One collective. The loss and the tokens are of all ranks only where one speaks for those that hold the same.
        """
        handle = self.handle
        told = said[:1] * handle.speaks(ROW_AXES)
        parts = [
            (loss * handle.axes.speaks(LOSS_AXES, handle.rank)).view(1),
            told,
            said[1:],
            take_loads(handle),
        ]
        vector = handle.over_all_ranks(torch.cat(parts))
        vector, loads = vector[: 1 + CONTROL_VECTOR], vector[1 + CONTROL_VECTOR :]
        uneven = imbalance(handle, loads) if loads.numel() else torch.zeros_like(loss)
        return torch.cat([vector, torch.stack([norm.to(vector.dtype), tokens, uneven])]), loads

    def result(self, values: Tensor, loads: Tensor, batch: StepBatch) -> StepResult:
        """What `summed` came to, once the host has waited for the device.

        Raises DataError when no token of the batch bears loss.
        """
        sums = StepSums.of(values)
        if sums.tokens == 0:
            raise DataError(
                f"step {batch.step + 1}: no token of the batch bears loss (rows {shorten(batch.rows)}); "
                "check that the data's answers are not empty or cut off, or raise train.batch"
            )
        said, experts = sums.said, bool(loads.numel())
        return StepResult(
            loss=sums.loss,
            grad_norm=sums.norm,
            tokens=int(sums.tokens),
            next_tokens=said.next_tokens,
            stop=said.stop > 0,
            memory=said.memory,
            graph_ends=said.graph_ends > 0,
            links_changed=said.links_changed > 0,
            save=said.save > 0,
            expert_imbalance=sums.imbalance if experts else None,
            expert_loads=loads.tolist() if experts else None,
        )
