"""The end of a captured step, behind its last backward pass: the norm, what ranks say, clipping, the update."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hyper_parallel.graph import host, phase
from hyper_parallel.graph.suspension import HostPoint
from hyper_parallel.shard.experts.load_balancing import update_biases
from hyper_parallel.shard.gradient_clipping import clip_gradients
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe


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
