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

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.launch import logs
from hyper_parallel.launch.stop import Requests
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.experts.loads import update_biases
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.nonfinite_report import non_finite
from hyper_parallel.step.recipe import ControlVector, Recipe, StepResult

LossOf = Callable[..., Tensor]
"""A part of the step's loss with the arguments of `causal_lm_loss`."""


def accumulate(
    model: nn.Module,
    handle: ShardedModel,
    batch: StepBatch,
    tokens: Tensor,
    seed: int,
    options: LossConfig | None = None,
    loss_of: LossOf = causal_lm_loss,
) -> Tensor:
    """Add the gradients of a rank's micro-batches; its part of the step's loss, a detached zero-dim fp32 tensor.

    `tokens` is the number of valid tokens of the step over all ranks. `loss_of`: called as `causal_lm_loss` is.
    """
    total = torch.zeros((), device=tokens.device)
    for index, micro in enumerate(batch.micro):
        last = index == len(batch.micro) - 1
        known = contextlib.nullcontext() if micro.several is None else documents_known(micro.several)
        with (
            known,
            logs.at(batch.step + 1, index),
            handle.micro_batch(seed=seed, step=batch.step, rows=micro.rows, last=last),
        ):
            loss = loss_of(
                model,
                micro.input_ids,
                micro.labels,
                micro.position_ids,
                tokens,
                options,
                micro_batches=len(batch.micro),
                **micro.extra,
            )
            loss.backward()
        total += loss.detach()
    return total


Accumulate = Callable[[StepBatch, Tensor], Tensor]
"""Gives each parameter of this rank its gradient of a batch; (batch, valid tokens) to this rank's part of the loss."""


class Stepper:
    """Runs steps eagerly, one after the other; holds the batch that was loaded ahead."""

    def __init__(self, recipe: Recipe, accumulate: Accumulate | None = None) -> None:
        """`accumulate`: the micro-batches; one after the other on this rank when left out."""
        self._recipe = recipe
        self._accumulate = accumulate or self._eagerly

    def _eagerly(self, batch: StepBatch, tokens: Tensor) -> Tensor:
        recipe = self._recipe
        recipe.forget()
        return accumulate(
            recipe.model.train(), recipe.handle, batch, tokens, recipe.seed, recipe.loss, recipe.loss_of
        )

    def begin(self, batch: StepBatch) -> None:
        """Take the batch that the next `run` computes; a collective, needed before the first one only."""
        self.take(batch, self._recipe.tokens(batch))

    def take(self, batch: StepBatch, tokens: Tensor) -> None:
        """Take the next batch, whose valid `tokens` over all ranks are known."""
        self._batch, self._tokens = batch, tokens

    def run(
        self,
        *,
        load_next: Callable[[], StepBatch] | None,
        memory: float,
        requests: Callable[[], Requests] = Requests,
    ) -> StepResult:
        """One step on the batch at hand.

        `load_next` loads the batch of the step after it, None if there is none. `memory` and what `requests` returns
        are what this rank has to say; it is called late in the step, so that a request waits for one step at most.

        Raises DataError when no token of the batch bears loss, and NonFiniteError when the loss or the gradient
        norm is not finite; parameters and optimizer are then as before the step. Every rank raises the same.
        """
        return self.update(self.gradients(), load_next=load_next, memory=memory, requests=requests)

    def gradients(self) -> Tensor:
        """The first half of `run`: gradients of the batch at hand; this rank's part of the loss."""
        return self._accumulate(self._batch, self._tokens)

    def update(
        self,
        loss: Tensor,
        *,
        load_next: Callable[[], StepBatch] | None,
        memory: float,
        requests: Callable[[], Requests] = Requests,
    ) -> StepResult:
        """The second half of `run`, from this rank's part of the loss; the gradients are there."""
        recipe, batch, tokens = self._recipe, self._batch, self._tokens
        model, handle = recipe.model, recipe.handle
        norm = handle.grad_norm()
        following = load_next() if load_next is not None else None
        said = control_values_of(following, requests(), memory, loss.device)
        values, loads = recipe.summed(loss, norm, tokens, said)
        result = recipe.result(values, loads, batch)
        if not result.finite:
            raise non_finite(handle, batch.step, batch.rows, result.loss, result.grad_norm)
        if recipe.clip is not None and result.grad_norm > recipe.clip:
            handle.clip(norm, recipe.clip)
        recipe.optimizer.step(recipe.schedule(batch.step))
        if recipe.router_bias_rate:
            update_biases(model, loads, recipe.router_bias_rate)
        model.zero_grad(set_to_none=True)
        if following is not None:
            self.take(following, tokens.new_tensor(result.next_tokens))
        return result

    def probe(self, batch: StepBatch) -> StepResult | None:
        """What a step on `batch`, which is not taken, would come to: gradients are computed, and nothing is updated.

        A collective. None where that cannot be told, on every rank.
        """
        recipe = self._recipe
        model, handle = recipe.model, recipe.handle
        tokens = recipe.tokens(batch)
        loss = self._accumulate(batch, tokens)
        said = control_values_of(None, Requests(), 0.0, loss.device)
        values, loads = recipe.summed(loss, handle.grad_norm(), tokens, said)
        model.zero_grad(set_to_none=True)
        return recipe.result(values, loads, batch)


def control_values_of(
    following: StepBatch | None,
    requests: Requests,
    memory: float,
    device: torch.device,
    graph_ends: bool = False,
    links_changed: bool = False,
) -> Tensor:
    """What a rank says in a step: a `ControlVector` as fp32 [6]."""
    said = ControlVector(
        next_tokens=0.0,
        stop=float(requests.stop),
        memory=memory,
        graph_ends=float(graph_ends),
        links_changed=float(links_changed),
        save=float(requests.save),
    )
    vector = torch.tensor(said, device=device)
    if following is not None:
        # From tensor to tensor: the host does not wait for the count.
        vector[ControlVector._fields.index("next_tokens")] = following.tokens
    return vector
