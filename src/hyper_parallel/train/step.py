"""One training step: gradients of the whole batch, the checks, the update.

Order of operations of step n (docs/training.md says why):

1. forward and backward of each micro-batch; the loss is divided by the step's global number of valid tokens
2. the global gradient norm                                   (its own reduction)
3. the next step's batch is loaded, while the device computes
4. one reduction of a small vector: loss, next step's valid tokens, stop flag, memory, each expert's load
5. the host waits for the device, once; a loss or norm that is not finite ends the run here
6. clipping, the optimizer's update, the correction of the routers' biases
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import DataError
from hyper_parallel.launch import logs
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.experts.routing import imbalance, take_loads, update_biases
from hyper_parallel.shard.handle import LOSS_AXES, ROW_AXES
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.train.batches import StepBatch
from hyper_parallel.train.guard import non_finite, shorten
from hyper_parallel.train.optimizer import Optimizer
from hyper_parallel.train.schedule import Schedule


@dataclass(frozen=True)
class StepResult:
    """What a step came to, equal on every rank."""

    loss: float
    grad_norm: float
    """The global 2-norm before clipping."""
    tokens: int
    """Valid tokens: those that bear loss."""
    stop: bool
    """Some rank was asked to stop."""
    memory: float
    """Sum over the ranks of what each said that it holds, in bytes."""
    expert_imbalance: float | None = None
    """The largest ratio, over the layers, of the busiest expert's load to the mean; None without experts."""
    expert_loads: Tensor | None = None
    """fp32 on the device: the rows that each expert of each layer got in the whole step; None without experts."""


def accumulate(
    model: nn.Module,
    handle: ShardedModel,
    batch: StepBatch,
    tokens: Tensor,
    seed: int,
    options: LossConfig | None = None,
) -> Tensor:
    """Add the gradients of a rank's micro-batches; its part of the step's loss, a detached zero-dim fp32 tensor.

    `tokens` is the number of valid tokens of the step over all ranks.
    """
    total = torch.zeros((), device=tokens.device)
    for index, micro in enumerate(batch.micro):
        last = index == len(batch.micro) - 1
        with (
            logs.at(batch.step + 1, index),
            handle.micro_batch(seed=seed, step=batch.step, rows=micro.rows, last=last),
        ):
            loss = causal_lm_loss(
                model,
                micro.input_ids,
                micro.labels,
                micro.position_ids,
                tokens,
                options,
                micro_batches=len(batch.micro),
            )
            loss.backward()
        total += loss.detach()
    return total


class Stepper:
    """Runs steps one after the other; holds the batch that was loaded ahead."""

    def __init__(
        self,
        model: nn.Module,
        handle: ShardedModel,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        seed: int,
        clip: float | None,
        loss: LossConfig | None = None,
        router_bias_rate: float = 0.0,
    ) -> None:
        self._model, self._handle, self._optimizer, self._schedule = model, handle, optimizer, schedule
        self._seed, self._clip, self._loss = seed, clip, loss
        self._router_bias_rate = router_bias_rate
        self._axes = handle.mesh.names
        # Ranks along the other axes hold the same rows, or the same part of the loss: one of them speaks for all.
        self._tells_tokens, self._tells_loss = _speaks(handle, ROW_AXES), _speaks(handle, LOSS_AXES)

    def begin(self, batch: StepBatch) -> None:
        """Take the batch that the next `run` computes; a collective, needed before the first one only."""
        self._batch = batch
        self._tokens = self._handle.all_reduce(batch.tokens * self._tells_tokens, self._axes)

    def run(self, *, load_next: Callable[[], StepBatch] | None, stop: bool, memory: float) -> StepResult:
        """One step on the batch at hand.

        `load_next` loads the batch of the step after it, None if there is none. `stop` and `memory` are what this
        rank has to say.

        Raises DataError when no token of the batch bears loss, and NonFiniteError when the loss or the gradient
        norm is not finite; parameters and optimizer are then as before the step. Every rank raises the same.
        """
        batch, tokens = self._batch, self._tokens
        self._model.train()
        loss = accumulate(self._model, self._handle, batch, tokens, self._seed, self._loss)
        norm = self._handle.grad_norm()
        following = load_next() if load_next is not None else None
        upcoming = following.tokens if following is not None else torch.zeros_like(loss)
        said = torch.tensor([float(stop), memory], device=loss.device)
        parts = torch.stack([loss * self._tells_loss, upcoming * self._tells_tokens])
        vector = torch.cat([parts, said, take_loads(self._handle)])
        vector = self._handle.all_reduce(vector, self._axes)
        vector, loads = vector[:4], vector[4:]
        uneven = imbalance(self._handle, loads) if loads.numel() else torch.zeros_like(loss)
        values = torch.cat([vector, torch.stack([norm.to(vector.dtype), tokens, uneven])]).tolist()
        total, _, stops, held, grad_norm, valid, ratio = values
        if valid == 0:
            raise DataError(
                f"step {batch.step + 1}: no token of the batch bears loss (rows {shorten(batch.rows)}); "
                "check that the data's answers are not empty or cut off, or raise train.batch"
            )
        if not (math.isfinite(total) and math.isfinite(grad_norm)):
            raise non_finite(self._handle, batch.step, batch.rows, total, grad_norm)
        if self._clip is not None and grad_norm > self._clip:
            self._handle.clip(norm, self._clip)
        self._optimizer.step(self._schedule(batch.step))
        if self._router_bias_rate:
            update_biases(self._model, loads, self._router_bias_rate)
        self._model.zero_grad(set_to_none=True)
        if following is not None:
            self._batch, self._tokens = following, vector[1]
        experts = (ratio, loads) if loads.numel() else (None, None)
        return StepResult(total, grad_norm, int(valid), stops > 0, held, *experts)


def _speaks(handle: ShardedModel, axes: tuple[str, ...]) -> float:
    """1 on one rank of those that differ along other axes than these, 0 on the others."""
    return float(all(index == 0 for axis, index in handle.coordinate.items() if axis not in axes))
