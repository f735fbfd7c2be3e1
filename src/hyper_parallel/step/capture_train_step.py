"""Captures the training step: one micro-batch, the norm, clipping, the update, as one graph.

It is the eager step (`step`) with what the host decides put into tensors:

- the learning rate's scale and the step's number are inputs, so that one graph serves every step;
- the host is asked twice: at "load" for what this rank says, when the device has been given the backward pass, and at
  "check" it is shown what the step came to, and may raise before anything is updated;
- under a memory budget it is asked once more for each exchange of experts' rows: at "rows" it is shown the largest load
  of all ranks (`StepContext.report_load`), and may raise before there is memory for the rows;
- clipping multiplies by min(1, clip / norm) always, which is by 1 where eager does not clip.

A step of several micro-batches is captured with one of them, and made a loop over all (`step.accumulation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_tensors import faked
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, capture, host, phase, rewritten
from hyper_parallel.graph.gradients import owned
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.ir import GivenTensor, module_state
from hyper_parallel.graph.step_context import current_step, micro_batch
from hyper_parallel.offloading.expert_overflow import load_shown
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.experts.loads import update_biases
from hyper_parallel.shard.forward import several_documents
from hyper_parallel.shard.memory import in_place, recompute_pass, recomputed_modules
from hyper_parallel.shard.saved_gathers import GatherBoundaries
from hyper_parallel.shard.sharded_model import clip_gradients
from hyper_parallel.step.accumulation import accumulating, whole_step
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import FewLayers, captured_by_periods, captured_few
from hyper_parallel.step.micro_batch import (
    MICRO_FIELDS,
    SUM,
    WEIGHT,
    blank_micro_batch,
    boundary_values,
    gradients_to,
    loss_of,
    micro_input,
    trained,
)
from hyper_parallel.step.optimizer import Optimizer, build_optimizer
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe


class MicroBatchShape(NamedTuple):
    """What one micro-batch is captured for."""

    rows: int
    length: int
    """Positions of each row."""
    documents: bool
    """Whether its rows hold several documents."""


@dataclass(frozen=True)
class BatchShape:
    """What a graph is captured for."""

    micro_batches: tuple[tuple[int, int], ...]
    """(rows, positions) of each."""
    documents: tuple[bool, ...]
    """Of each, whether its rows hold several documents."""

    @classmethod
    def of(cls, micro: Sequence[MicroBatch]) -> BatchShape:
        """The shape of a rank's micro-batches, a function of them alone.

        Where more than two differ in whether they hold several documents, all are computed as if they did, which is
        right for one document too: else there would be a graph for each of their 2^n combinations.
        """
        several = tuple(
            several_documents(batch.position_ids)
            if batch.several is None and batch.position_ids is not None
            else bool(batch.several)
            for batch in micro
        )
        if len(several) > 2 and any(several):
            several = (True,) * len(several)
        shapes = ((batch.input_ids.size(0), batch.input_ids.size(1)) for batch in micro)
        return cls(tuple(shapes), several)

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return len(self.micro_batches)

    @property
    def each(self) -> tuple[MicroBatchShape, ...]:
        """The shape of each micro-batch."""
        pairs = zip(self.micro_batches, self.documents, strict=True)
        return tuple(MicroBatchShape(rows, length, several) for (rows, length), several in pairs)


def capture_step(recipe: Recipe, shape: BatchShape, device: torch.device | str = "cpu") -> StepGraph:
    """The graph of one rank's step; arguments, inputs and errors are those of `capture_one`. Of micro-batches that are
    alike one is captured, and the others are copies of it."""
    if shape.count == 1:
        return capture_one(recipe, shape.each[0], 1, device)
    level = recipe.handle.strategy.memory.shard
    loops = {
        kind: accumulating(capture_one(recipe, kind, shape.count, device), level)
        for kind in dict.fromkeys(shape.each)
    }
    return whole_step([loops[kind] for kind in shape.each])


def capture_one(
    recipe: Recipe, shape: MicroBatchShape, micro_batches: int, device: torch.device | str = "cpu"
) -> StepGraph:
    """The graph of one rank's step with one of its `micro_batches`. The model was parallelized in the traceable
    lowering; it may be on the meta device.

    The inputs are named ``parameter.<name>``, ``buffer.<name>``, the names of the optimizer's tensors, and those of
    `batch_inputs`. It is written for any routing of tokens to experts; under a `StepContext.even_load` for one
    that spreads evenly, which is quick for any number of experts, right for costs, and refused by
    `graph.executable`. Where it stands for several micro-batches, the graph returns what `accumulating` cuts it at: the
    outputs of `capture_micro_batch`. Raises CaptureError where the step cannot be followed.
    """
    step = captured_by_periods(recipe, lambda: _captured(recipe, shape, micro_batches, device))
    again = recompute_pass(recipe.handle.strategy, recomputed_modules(recipe.model, recipe.handle.strategy))
    return step if again is None else rewritten(step, [again])


def capture_few(recipe: Recipe, shape: MicroBatchShape, micro_batches: int) -> FewLayers | None:
    """The graphs of `capture_one` with few of the model's layers, before any is computed again; None where the layers
    do not follow each other alike."""
    return captured_few(recipe, lambda: _captured(recipe, shape, micro_batches, "cpu"))


def _captured(
    recipe: Recipe, shape: MicroBatchShape, micro_batches: int, device: torch.device | str
) -> StepGraph:
    """As `capture_one`, of the layers that run, before any is computed again."""
    mode = fake_mode_with_symbols()
    boundaries = None if micro_batches == 1 else GatherBoundaries()
    if boundaries is not None:
        recipe = replace(recipe, handle=replace(recipe.handle, gathers=boundaries))
    handle, model = recipe.handle, recipe.model.train()
    with faked(model, mode, device):
        # Built outside of the mode, so that its tensors are inputs and their making is no part of the step.
        with mode:
            optimizer = capturable(build_optimizer(model, recipe.optimizer.config))
            micro = blank_micro_batch(shape.rows, shape.length, device, recipe.inputs)
            step = torch.zeros((), dtype=torch.int64, device=device)
            tokens = torch.ones((), device=device)
            lr_scale = torch.ones((), dtype=torch.float64)
        body = _Body(
            replace(recipe, optimizer=optimizer),
            micro,
            shape.documents,
            step,
            tokens,
            lr_scale,
            micro_batches,
            boundaries,
        )
        tensors = {
            **state(handle, optimizer),
            **{
                name: GivenTensor("input", tensor)
                for name, tensor in batch_inputs([micro], step, tokens, lr_scale).items()
            },
        }
        # Where a budget is to be kept, the host is shown how uneven the rows of each exchange are.
        report = load_shown(handle) if handle.strategy.memory.device is not None else None
        context = replace(current_step(), recompute_in_graph=True, report_load=report)
        try:
            with mode, context.installed():
                found = capture(body, tensors, model, lambda: body.gradients)
                # Asked for now: the step has made those that it was the first to need.
                found.groups = handle.axes.process_groups()
                found.balanced = context.even_load is not None and bool(handle.plan.experts)
        finally:
            body.forget()
    return in_place(found, handle)


def capturable(optimizer: Optimizer) -> Optimizer:
    """The optimizer. Raises CaptureError for one that cannot be part of a graph."""
    for name in ("tensors", "advance"):
        if not hasattr(optimizer, name):
            raise CaptureError(
                f"the step cannot be captured: the optimizer {type(optimizer).__name__} has no {name!r}, which its "
                "part in a step's graph needs (step/optimizer/interface.py)"
            )
    return optimizer


def state(handle: ShardedModel, optimizer: Optimizer) -> dict[str, GivenTensor]:
    """Everything that lives across steps, by the names of the graph's inputs."""
    moments = {name: GivenTensor("optimizer", tensor) for name, tensor in optimizer.tensors().items()}
    return {**module_state(handle.model), **moments}


def batch_inputs(
    micro: list[MicroBatch], step: Tensor, tokens: Tensor, lr_scale: Tensor
) -> dict[str, Tensor]:
    """What a step is given besides its state, by the names of the graph's inputs."""
    named = {
        micro_input(number, key): value
        for number, batch in enumerate(micro)
        for key, value in ({key: getattr(batch, key) for key in MICRO_FIELDS} | {**batch.extra}).items()
    }
    return {**named, "step": step, "tokens": tokens, "lr_scale": lr_scale}


class _Body:
    """The step's own code, on whatever tensors the model has."""

    def __init__(
        self,
        recipe: Recipe,
        micro: MicroBatch,
        documents: bool,
        step: Tensor,
        tokens: Tensor,
        lr_scale: Tensor,
        micro_batches: int,
        boundaries: GatherBoundaries | None,
    ) -> None:
        """`boundaries`: of a micro-batch that stands for several, where it can be cut."""
        self._recipe, self._micro, self._documents = recipe, micro, documents
        self._micro_batches, self._boundaries = micro_batches, boundaries
        self._step, self._tokens, self._lr_scale = step, tokens, lr_scale
        self._names = trained(recipe)
        self._of: dict[nn.Parameter, Tensor] = {}
        self._taken: set[int] = set()
        """Addresses of the storages of what is in `_of`."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients by the names of their parameters."""
        return {self._names[parameter]: gradient for parameter, gradient in self._of.items()}

    def __call__(self) -> dict[str, Tensor]:
        recipe = self._recipe
        recipe.forget()
        with gradients_to(recipe, self._keep), micro_batch(0):
            loss = loss_of(
                recipe,
                self._micro,
                self._step,
                self._tokens,
                documents=self._documents,
                micro_batches=self._micro_batches,
                last=True,
            )
        shown = {} if self._boundaries is None else self._shown(self._boundaries, loss)
        for parameter, gradient in self._of.items():
            parameter.grad = gradient
        finish_step(recipe, self._of.values(), loss, self._tokens, self._lr_scale)
        return shown

    def _shown(self, boundaries: GatherBoundaries, loss: Tensor) -> dict[str, Tensor]:
        """What the graph can be cut at."""
        handle = self._recipe.handle
        shown = boundary_values(handle, boundaries, loss, self.gradients)
        shown |= {f"{SUM}{name}": one for name, one in self._recipe.sums().items()}
        if handle.strategy.memory.shard == "parameters":
            # Gathered in each micro-batch: what is returned would be kept.
            shown = {name: value for name, value in shown.items() if not name.startswith(WEIGHT)}
        with phase("clip"), torch.no_grad():
            # What runs once a step changes gradients in place, under other names than those that are shown.
            self._of = {parameter: gradient.view_as(gradient) for parameter, gradient in self._of.items()}
        return shown

    def _keep(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch.no_grad():
                self._of[parameter] = owned(gradient, parameter, self._taken)

    def forget(self) -> None:
        """Let go of the gradients."""
        for parameter in self._names:
            parameter.grad = None
        self._of.clear()
        self._taken.clear()
        self._recipe.forget()


def finish_step(
    recipe: Recipe, gradients: Iterable[Tensor], loss: Tensor, tokens: Tensor, lr_scale: Tensor
) -> None:
    """Update the parameters, which have these gradients, where the host does not raise at ``check``.

    `loss`: this rank's part, fp32 []; `tokens`: valid ones over all ranks, fp32 []; `lr_scale`: of the schedule,
    float64 [].
    """
    with phase("clip"):
        norm = recipe.handle.grad_norm()
        said = host(HostPoint.LOAD, [loss], CONTROL_VECTOR)
        values, loads = recipe.summed(loss, norm, tokens, said)
        host(HostPoint.CHECK, [values, loads])
        if recipe.clip is not None:
            clip_gradients(gradients, norm, recipe.clip, in_graph=True)
    with phase("optimizer"):
        recipe.optimizer.step(lr_scale)
        if recipe.router_bias_rate:
            update_biases(recipe.model, loads, recipe.router_bias_rate)
