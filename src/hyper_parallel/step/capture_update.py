"""Captures what follows the schedule of a pipeline's step: sums over the stages that share weights, and the update.

It is the end of the step that plain training captures (`step.finish_step`), from gradients that are inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat import collectives
from hyper_parallel.compat.fake_process_group import faked
from hyper_parallel.compat.symbolic_sizes import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture, phase
from hyper_parallel.graph.gradient_sums import GRADIENT
from hyper_parallel.graph.ir import CollectiveGroup, GivenTensor, Value
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.step.capture_train_step import capturable, state
from hyper_parallel.step.finish_step import finish_step
from hyper_parallel.step.micro_batch import LOSS, ROWS
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe


@dataclass(frozen=True)
class SharedGradient:
    """A gradient of which several device groups have parts."""

    value: Value
    group: CollectiveGroup
    """Of the ranks that have them."""


def capture_update(
    recipe: Recipe,
    given: Mapping[str, Value],
    shared: Mapping[str, SharedGradient],
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of what follows the schedule on one rank of a pipeline.

    `recipe`: of the shadow, whose handle knows which parameters this rank holds. `given`: what the schedule came to,
    by name: ``gradient.<parameter>``, ``loss`` in the last stage, ``rows.<experts module>``. These are inputs beside
    the state, ``tokens`` and ``lr_scale``. `shared`: by parameter.
    """
    mode, model, handle = fake_mode_with_symbols(), recipe.model.train(), recipe.handle
    with faked(model, mode, device):
        with mode:
            optimizer = capturable(build_optimizer(model, recipe.optimizer.config))
            tensors = {
                name: torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
                for name, one in given.items()
            }
            tokens = torch.ones((), device=device)
            lr_scale = torch.ones((), dtype=torch.float64)
        body = _Body(replace(recipe, optimizer=optimizer), tensors, shared, tokens, lr_scale)
        inputs = {
            **state(handle, optimizer),
            **{
                name: GivenTensor("gradient" if name.startswith(GRADIENT) else "input", one)
                for name, one in {**tensors, "tokens": tokens, "lr_scale": lr_scale}.items()
            },
        }
        try:
            with mode, current_step().installed():
                found = capture(body, inputs, model, lambda: body.gradients)
        finally:
            body.forget()
    everyone = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    found.groups = {
        **handle.axes.process_groups(),
        everyone: CollectiveGroup(everyone, "pipeline", tuple(range(handle.world))),
        **{one.group.name: one.group for one in shared.values()},
    }
    return found


class _Body:
    """The code, on fake tensors."""

    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, Tensor],
        shared: Mapping[str, SharedGradient],
        tokens: Tensor,
        lr_scale: Tensor,
    ) -> None:
        self._recipe, self._tensors, self._shared = recipe, tensors, shared
        self._tokens, self._lr_scale = tokens, lr_scale
        self._of: dict[nn.Parameter, str] = {
            one.parameter: one.name for one in recipe.handle.owned() if one.parameter.requires_grad
        }

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients by the names of their parameters."""
        return {name: parameter.grad for parameter, name in self._of.items() if parameter.grad is not None}

    def __call__(self) -> dict[str, Tensor]:
        recipe = self._recipe
        with phase("clip"), torch.no_grad():
            for parameter, name in self._of.items():
                parameter.grad = self._gradient(name)
            loss = self._tensors.get(LOSS)
            if loss is None:
                loss = torch.zeros((), device=self._tokens.device)
        if recipe.handle.routing is not None:
            rows = {k.removeprefix(ROWS): v for k, v in self._tensors.items() if k.startswith(ROWS)}
            recipe.handle.routing.counts.update(rows)
        finish_step(recipe, self.gradients.values(), loss, self._tokens, self._lr_scale)
        return {}

    def _gradient(self, name: str) -> Tensor | None:
        """A parameter's gradient, of all stages."""
        found, shared = self._tensors.get(GRADIENT + name), self._shared.get(name)
        if shared is None:
            return found
        if found is None:
            # Another holder's stages compute the whole gradient.
            like = shared.value
            found = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()
        return collectives.all_reduce(found, shared.group.name)

    def forget(self) -> None:
        """Let go of the gradients."""
        for parameter in self._of:
            parameter.grad = None
        if self._recipe.handle.routing is not None:
            self._recipe.handle.routing.counts.clear()
