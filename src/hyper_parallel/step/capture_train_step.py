"""Captures the whole training step as one graph: all micro-batches, the norm, clipping, the update.

It is the eager step (`step`) with what the host decides put into tensors:

- the learning rate's scale and the step's number are inputs, so that one graph serves every step;
- the host is asked twice: at "load" for what this rank says, when the device has been given the backward pass, and at
  "check" it is shown what the step came to, and may raise before anything is updated;
- under a memory budget it is asked once more for each exchange of experts' rows: at "rows" it is shown the largest load
  of all ranks (`StepContext.report_load`), and may raise before there is memory for the rows;
- clipping multiplies by min(1, clip / norm) always, which is by 1 where eager does not clip.

Gradients are added up as they come, each into the first one of its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_process_group import faked
from hyper_parallel.compat.symbolic_sizes import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, capture, host, phase, rewritten
from hyper_parallel.graph.gradient_layout import owned
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.graph.regions import micro_batch
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.graph.suspension import HostPoint
from hyper_parallel.offloading.runtime.expert_overflow import load_shown
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.experts.load_balancing import update_biases
from hyper_parallel.shard.gradient_clipping import clip_gradients
from hyper_parallel.shard.graph_passes import recompute_pass
from hyper_parallel.shard.model_structure import layers_or_refuse
from hyper_parallel.shard.packed_documents import several_documents
from hyper_parallel.shard.saved_gathers import GatherBoundaries
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.micro_batch import (
    MICRO_FIELDS,
    WEIGHT,
    blank_micro_batch,
    boundary_values,
    gradients_to,
    loss_of,
    trained,
)
from hyper_parallel.step.optimizer import Optimizer, build_optimizer
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe


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
            several_documents(batch.position_ids) if batch.several is None else batch.several
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
    def each(self) -> BatchShape | None:
        """The shape of a step of one of the micro-batches; None where there is one, or they differ."""
        if self.count == 1 or len(set(self.micro_batches)) > 1 or len(set(self.documents)) > 1:
            return None
        return BatchShape(self.micro_batches[:1], self.documents[:1])


def capture_step(
    recipe: Recipe, shape: BatchShape, device: torch.device | str = "cpu", *, one_of: int | None = None
) -> StepGraph:
    """The graph of one rank's step. The model was parallelized in the traceable lowering; it may be on the meta device.

    The inputs are named ``parameter.<name>``, ``buffer.<name>``, the names of the optimizer's tensors, and those of
    `batch_inputs`. It is written for any routing of tokens to experts; under a `StepContext.even_load` for one
    that spreads evenly, which is quick for any number of experts, right for costs, and refused by
    `graph.executable`. Raises CaptureError where the step cannot be followed.

    `one_of`: the one micro-batch of the shape stands for so many, and the graph returns what it can be cut at: the
    outputs of `capture_micro_batch`.
    """
    mode = fake_mode_with_symbols()
    boundaries = None if one_of is None else GatherBoundaries()
    if boundaries is not None:
        recipe = replace(recipe, handle=replace(recipe.handle, gathers=boundaries))
    handle, model = recipe.handle, recipe.model.train()
    with faked(model, mode, device):
        # Built outside of the mode, so that its tensors are inputs and their making is no part of the step.
        with mode:
            optimizer = _capturable(build_optimizer(model, recipe.optimizer.config))
            micro = [blank_micro_batch(rows, length, device) for rows, length in shape.micro_batches]
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
            one_of,
            boundaries,
        )
        tensors = {
            **state(handle, optimizer),
            **{
                name: GivenTensor("input", tensor)
                for name, tensor in batch_inputs(micro, step, tokens, lr_scale).items()
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
    if handle.strategy.memory.recompute != "layer":
        return found
    name, modules = layers_or_refuse(model, "memory.recompute: layer")
    again = [f"{name}.{index}" for index in range(len(modules))]
    return rewritten(found, [recompute_pass(again, alone=handle.strategy.axes.world == 1)])


def _capturable(optimizer: Optimizer) -> Optimizer:
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
    named = {f"micro.{i}.{key}": getattr(batch, key) for i, batch in enumerate(micro) for key in MICRO_FIELDS}
    return {**named, "step": step, "tokens": tokens, "lr_scale": lr_scale}


class _Body:
    """The step's own code, on whatever tensors the model has."""

    def __init__(
        self,
        recipe: Recipe,
        micro: list[MicroBatch],
        documents: tuple[bool, ...],
        step: Tensor,
        tokens: Tensor,
        lr_scale: Tensor,
        one_of: int | None,
        boundaries: GatherBoundaries | None,
    ) -> None:
        self._recipe, self._micro, self._documents = recipe, micro, documents
        self._count, self._boundaries = one_of or len(micro), boundaries
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
        recipe, handle = self._recipe, self._recipe.handle
        total = torch.zeros((), device=self._tokens.device)
        with gradients_to(recipe, self._add):
            for index in range(len(self._micro)):
                with micro_batch(index):
                    loss = self._accumulate(index)
                    total = total + loss
        shown = {} if self._boundaries is None else self._shown(self._boundaries, loss)
        for parameter, gradient in self._of.items():
            parameter.grad = gradient
        with phase("clip"):
            norm = handle.grad_norm()
            said = host(HostPoint.LOAD, [total], CONTROL_VECTOR)
            values, loads = recipe.summed(total, norm, self._tokens, said)
            host(HostPoint.CHECK, [values, loads])
            if recipe.clip is not None:
                clip_gradients(self._of.values(), norm, recipe.clip, in_graph=True)
        with phase("optimizer"):
            recipe.optimizer.step(self._lr_scale)
            if recipe.router_bias_rate:
                update_biases(recipe.model, loads, recipe.router_bias_rate)
        return shown

    def _shown(self, boundaries: GatherBoundaries, loss: Tensor) -> dict[str, Tensor]:
        """What the graph can be cut at."""
        handle = self._recipe.handle
        shown = boundary_values(handle, boundaries, loss, self.gradients)
        if handle.strategy.memory.shard == "parameters":
            # Gathered in each micro-batch: what is returned would be kept.
            shown = {name: value for name, value in shown.items() if not name.startswith(WEIGHT)}
        with torch.no_grad():
            # What runs once a step changes gradients in place, under other names than those that are shown.
            self._of = {parameter: gradient.view_as(gradient) for parameter, gradient in self._of.items()}
        return shown

    def _accumulate(self, index: int) -> Tensor:
        recipe, micro = self._recipe, self._micro[index]
        last = index == len(self._micro) - 1
        return loss_of(
            recipe,
            micro,
            self._step,
            self._tokens,
            documents=self._documents[index],
            micro_batches=self._count,
            last=last,
        )

    def _add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None:  # kept whole until the last micro-batch
            return
        with torch.no_grad():
            known = self._of.get(parameter)
            if known is not None:
                known.add_(gradient)
            else:
                self._of[parameter] = owned(gradient, parameter, self._taken)

    def forget(self) -> None:
        """Let go of the gradients."""
        for parameter in self._names:
            parameter.grad = None
        self._of.clear()
        self._taken.clear()
