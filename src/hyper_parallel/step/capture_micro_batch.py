"""Captures one micro-batch: forward pass, loss and backward pass as one graph, whatever number of them a step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_process_group import faked
from hyper_parallel.compat.symbolic_sizes import fake_mode_with_symbols
from hyper_parallel.config.train import LossConfig
from hyper_parallel.graph import StepGraph, capture
from hyper_parallel.graph.gradient_layout import owned
from hyper_parallel.graph.gradient_sums import UNREDUCED, UNSUMMED
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.graph.subgraph import subgraph
from hyper_parallel.shard.graph_passes import in_place
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.packed_documents import documents_known
from hyper_parallel.shard.saved_gathers import GatherBoundaries
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_periods import captured_by_periods
from hyper_parallel.step.micro_batch import (
    LOSS,
    MICRO_FIELDS,
    WEIGHT,
    blank_like,
    blank_micro_batch,
    boundary_values,
    gradients_to,
    loss_of,
    trained,
)
from hyper_parallel.step.recipe import GradientRecipe


def capture_micro_batch(
    recipe: GradientRecipe,
    rows: int,
    length: int,
    micro_batches: int,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of one of a step's `micro_batches`, of [rows, length] tokens.

    Inputs: ``parameter.<name>``, ``buffer.<name>``, ``micro.<field>``, ``step`` and ``tokens``. Outputs: ``loss``,
    ``gradient.<name>`` of each parameter that has one, reduced over all ranks, ``rows.<experts module>``; and where the
    graph can be cut from what runs once a step: gathered weights ``weight.<n>``, gradients before their reduction over
    shards (``gradient.unreduced:<n>``) and over copies (``gradient.unsummed:<n>``). Who runs the graph adds up what
    it returns. The model was parallelized in the traceable lowering and may be on the meta device. Layers that the
    strategy recomputes are computed once: a pass has them computed again.

    Raises CaptureError where the micro-batch cannot be followed.
    """

    def captured() -> StepGraph:
        return _captured(
            recipe, lambda: blank_micro_batch(rows, length, device), micro_batches, documents, device
        )

    return captured_by_periods(recipe, captured)


def capture_micro_batch_like(
    recipe: GradientRecipe,
    micro: MicroBatch,
    micro_batches: int,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[StepGraph, list[Question]]:
    """As `capture_micro_batch`, with the shapes of `micro` and all that its model takes; and what the model asks of its
    values: the graph is right for inputs with the same answers."""
    questions = Questions(fields_of(micro))
    step = _captured(recipe, lambda: blank_like(micro, device), micro_batches, documents, device, questions)
    return step, questions.asked


def _captured(
    recipe: GradientRecipe,
    blank: Callable[[], MicroBatch],
    micro_batches: int,
    documents: bool,
    device: torch.device | str,
    questions: Questions | None = None,
) -> StepGraph:
    """Of the layers that run."""
    mode = fake_mode_with_symbols()
    boundaries = GatherBoundaries()
    recipe = replace(recipe, handle=replace(recipe.handle, gathers=boundaries), model=recipe.model.train())
    with faked(recipe.model, mode, device):
        with mode:
            micro = blank()
            step = torch.zeros((), dtype=torch.int64, device=device)
            tokens = torch.ones((), device=device)
        body = _Body(recipe, boundaries, micro, micro_batches, documents, step, tokens)
        inputs = {name: GivenTensor("input", one) for name, one in batch_of(micro, step, tokens).items()}
        context = replace(current_step(), recompute_in_graph=True, micro_batch=0)
        try:
            with mode, context.installed():
                found = capture(
                    body,
                    {**module_state(recipe.model), **inputs},
                    recipe.model,
                    lambda: body.gradients,
                    questions=questions,
                )
                found.groups = recipe.handle.axes.process_groups()
                found.balanced = context.even_load is not None and bool(recipe.handle.plan.experts)
        finally:
            body.forget()
    return in_place(found, recipe.handle)


def without_boundaries(step: StepGraph) -> StepGraph:
    """A captured micro-batch that returns the loss, the gradients and the counts, and nothing to be cut at."""
    wanted = {
        name: node
        for name, node in step.returned.items()
        if not name.startswith((WEIGHT, UNREDUCED, UNSUMMED))
    }
    return subgraph(step, wanted, {}, "parameter", "backward", effects=True)


def capture_evaluation(
    recipe: GradientRecipe,
    rows: int,
    length: int,
    loss: LossConfig | None = None,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of a forward pass on [rows, length] held-out tokens, without gradients.

    Inputs as of `capture_micro_batch`, without ``step`` and ``tokens``; outputs: ``loss``, the sum over tokens, and
    gathered weights. Raises CaptureError where the forward pass cannot be followed.
    """
    return _evaluated(recipe, lambda: blank_micro_batch(rows, length, device), loss, documents, device)


def capture_evaluation_like(
    recipe: GradientRecipe,
    micro: MicroBatch,
    loss: LossConfig | None = None,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[StepGraph, list[Question]]:
    """As `capture_evaluation`, of rows like `micro`; and what the model asks of their values, as
    `capture_micro_batch_like` has it."""
    questions = Questions(fields_of(micro))
    step = _evaluated(recipe, lambda: blank_like(micro, device), loss, documents, device, questions)
    return step, questions.asked


def _evaluated(
    recipe: GradientRecipe,
    blank: Callable[[], MicroBatch],
    loss: LossConfig | None,
    documents: bool,
    device: torch.device | str,
    questions: Questions | None = None,
) -> StepGraph:
    mode = fake_mode_with_symbols()
    boundaries = GatherBoundaries()
    model, handle = recipe.model, replace(recipe.handle, gathers=boundaries)
    training = model.training
    with faked(model, mode, device):
        with mode:
            micro = blank()

        def body() -> Mapping[str, Tensor]:
            with documents_known(documents), handle.micro_batch(), torch.no_grad():
                found = causal_lm_loss(
                    model,
                    micro.input_ids,
                    micro.labels,
                    micro.position_ids,
                    1.0,
                    loss,
                    micro_batches=1,
                    **micro.extra,
                )
            return {LOSS: found, **{f"{WEIGHT}{n}": one for n, one in enumerate(boundaries.gathered)}}

        inputs = {name: GivenTensor("input", one) for name, one in fields_of(micro).items()}
        try:
            with mode, replace(current_step(), micro_batch=0).installed():
                found = capture(body, {**module_state(model.eval()), **inputs}, model, questions=questions)
                found.groups = handle.axes.process_groups()
        finally:
            model.train(training)
    return found


def fields_of(micro: MicroBatch) -> dict[str, Tensor]:
    """What the graph of an evaluation is given besides the model's state."""
    given = {**{key: getattr(micro, key) for key in MICRO_FIELDS}, **micro.extra}
    return {f"micro.{key}": value for key, value in given.items()}


def batch_of(micro: MicroBatch, step: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What a micro-batch's graph is given besides the model's state."""
    return {**fields_of(micro), "step": step, "tokens": tokens}


class _Body:
    """The micro-batch's own code, on whatever tensors the model has."""

    def __init__(
        self,
        recipe: GradientRecipe,
        boundaries: GatherBoundaries,
        micro: MicroBatch,
        micro_batches: int,
        documents: bool,
        step: Tensor,
        tokens: Tensor,
    ) -> None:
        self._recipe, self._boundaries = recipe, boundaries
        self._micro, self._micro_batches, self._documents = micro, micro_batches, documents
        self._step, self._tokens = step, tokens
        self._names = trained(recipe)
        self._taken: set[int] = set()
        self.gradients: dict[str, Tensor] = {}
        """By the names of their parameters."""

    def __call__(self) -> Mapping[str, Tensor]:
        with gradients_to(self._recipe, self._keep):
            loss = loss_of(
                self._recipe,
                self._micro,
                self._step,
                self._tokens,
                documents=self._documents,
                micro_batches=self._micro_batches,
                last=True,
            )
        return boundary_values(self._recipe.handle, self._boundaries, loss, self.gradients)

    def _keep(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch.no_grad():
                self.gradients[self._names[parameter]] = owned(gradient, parameter, self._taken)

    def forget(self) -> None:
        """Let go of what the capture has computed."""
        self.gradients.clear()
        if self._recipe.handle.routing is not None:
            self._recipe.handle.routing.counts.clear()
