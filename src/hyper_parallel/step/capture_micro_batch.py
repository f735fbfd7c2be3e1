"""Captures one micro-batch: forward pass, loss and backward pass as one graph, whatever number of them a step has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_process_group import faked
from hyper_parallel.compat.symbolic_sizes import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture, phase
from hyper_parallel.graph.gradient_layout import owned
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.partition import GRADIENT
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.packed_documents import documents_known
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_train_step import MICRO_FIELDS, blank_micro_batch
from hyper_parallel.step.recipe import Recipe

LOSS = "loss"


def capture_micro_batch(
    recipe: Recipe,
    rows: int,
    length: int,
    micro_batches: int,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of one of a step's `micro_batches`, of [rows, length] tokens.

    Inputs: ``parameter.<name>``, ``buffer.<name>``, ``micro.<field>``, ``step`` and ``tokens``. Outputs: ``loss`` and
    ``gradient.<name>`` of each parameter that has one; who runs the graph adds them up. The model was parallelized in
    the traceable lowering and may be on the meta device. Raises CaptureError where the micro-batch cannot be followed.
    """
    mode = fake_mode_with_symbols()
    handle, model = recipe.handle, recipe.model.train()
    with faked(model, mode, device):
        with mode:
            micro = blank_micro_batch(rows, length, device)
            step = torch.zeros((), dtype=torch.int64, device=device)
            tokens = torch.ones((), device=device)
        body = _Body(recipe, micro, micro_batches, documents, step, tokens)
        parameters = {
            f"parameter.{one.name}": GivenTensor("parameter", one.parameter) for one in handle.parameters()
        }
        buffers = {f"buffer.{name}": GivenTensor("buffer", one) for name, one in handle.model.named_buffers()}
        batch = {f"micro.{key}": getattr(micro, key) for key in MICRO_FIELDS} | {
            "step": step,
            "tokens": tokens,
        }
        inputs = {name: GivenTensor("input", one) for name, one in batch.items()}
        try:
            with mode, replace(current_step(), recompute_in_graph=True, micro_batch=0).installed():
                found = capture(body, {**parameters, **buffers, **inputs}, model, lambda: body.gradients)
                found.groups = handle.axes.process_groups()
        finally:
            body.gradients.clear()
    return found


class _Body:
    """The micro-batch's own code, on whatever tensors the model has."""

    def __init__(
        self,
        recipe: Recipe,
        micro: MicroBatch,
        micro_batches: int,
        documents: bool,
        step: Tensor,
        tokens: Tensor,
    ) -> None:
        self._recipe, self._micro, self._micro_batches = recipe, micro, micro_batches
        self._documents, self._step, self._tokens = documents, step, tokens
        self.gradients: dict[str, Tensor] = {}
        """By the names of their parameters."""

    def __call__(self) -> Mapping[str, Tensor]:
        recipe, micro = self._recipe, self._micro
        named: dict[nn.Parameter, str] = {
            one.parameter: one.name for one in recipe.handle.parameters() if one.parameter.requires_grad
        }
        taken: set[int] = set()

        def keep(parameter: nn.Parameter, gradient: Tensor | None) -> None:
            if gradient is not None:
                with torch.no_grad():
                    self.gradients[named[parameter]] = owned(gradient, parameter, taken)

        hooks = [
            one.register_hook(lambda gradient, one=one: keep(one, gradient))  # type: ignore[misc]
            for one in named
        ]
        try:
            with (
                documents_known(self._documents),
                recipe.handle.micro_batch(seed=recipe.seed, step=self._step, rows=micro.rows, last=True),
            ):
                loss = causal_lm_loss(
                    recipe.model,
                    micro.input_ids,
                    micro.labels,
                    micro.position_ids,
                    self._tokens,
                    recipe.loss,
                    micro_batches=self._micro_batches,
                )
                with phase("backward"), torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.grad(loss, list(named), allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return {LOSS: loss.detach(), **{f"{GRADIENT}{name}": one for name, one in self.gradients.items()}}
