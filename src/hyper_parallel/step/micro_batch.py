"""Forward pass, loss and backward pass of one micro-batch as they are captured, whatever surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyper_parallel.graph import phase
from hyper_parallel.graph.gradients import GRADIENT, UNREDUCED, UNSUMMED
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.saved_gathers import GatherBoundaries
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.recipe import GradientRecipe

MICRO_FIELDS = ("input_ids", "labels", "position_ids", "rows")
"""The fields of a `MicroBatch` that are inputs of a graph."""


def micro_input(number: int, field: str) -> str:
    """The name of the input of a step's graph that is this field of the micro-batch of this number."""
    return f"micro.{number}.{field}"


LOSS = "loss"
LOGITS = "logits"
PLACE = "place"
"""The name of a place in a row among what a micro-batch's model takes, where the logits behind it are wanted."""
WEIGHT = "weight."
"""How the names of gathered weights begin."""
SUM = "sum."
"""How the names of what a loss adds up besides itself begin (`GradientRecipe.sums`)."""
ROWS = "rows."
"""How the names of the counts of tokens by expert begin; an experts module's name follows."""


def boundary_values(
    handle: ShardedModel, boundaries: GatherBoundaries, loss: Tensor, gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs of a captured micro-batch, by name: all that others are added to, and all that it can be cut at."""
    counts = handle.routing.counts if handle.routing is not None else {}
    return {
        LOSS: loss,
        **{f"{GRADIENT}{name}": one for name, one in gradients.items()},
        **{f"{ROWS}{name}": one for name, one in counts.items()},
        **{f"{WEIGHT}{n}": one for n, one in enumerate(boundaries.gathered)},
        **{f"{UNREDUCED}{n}": one for n, one in enumerate(boundaries.unreduced)},
        **{f"{UNSUMMED}{n}": one for n, one in enumerate(boundaries.unsummed)},
    }


def blank_micro_batch(
    rows: int, length: int, device: torch.device | str, inputs: Sequence[str] = ()
) -> MicroBatch:
    """A micro-batch of this shape, for a capture: its values say nothing. `inputs`: as of `GradientRecipe`."""
    ids, labels, positions = (torch.zeros(rows, length, dtype=torch.int64, device=device) for _ in range(3))
    extra = {name: torch.zeros(rows, length, device=device) for name in inputs}
    return MicroBatch(ids, labels, positions, torch.arange(rows, device=device), extra=extra)


def blank_like(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    """As `blank_micro_batch`, with the shapes of another one and all that its model takes."""

    def blank(one: Tensor) -> Tensor:
        return torch.zeros(one.shape, dtype=one.dtype, device=device)

    ids, labels, positions, rows = (blank(getattr(micro, key)) for key in MICRO_FIELDS)
    return MicroBatch(
        ids, labels, positions, rows, extra={name: blank(one) for name, one in micro.extra.items()}
    )


def trained(recipe: GradientRecipe) -> dict[nn.Parameter, str]:
    """The parameters that have gradients, and their names."""
    return {one.parameter: one.name for one in recipe.handle.parameters() if one.parameter.requires_grad}


@contextmanager
def gradients_to(
    recipe: GradientRecipe, take: Callable[[nn.Parameter, Tensor | None], None]
) -> Iterator[None]:
    """Inside, `take` gets each parameter's gradient of each backward pass, None where it is kept for a later one."""

    def hook_of(parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        return lambda gradient: take(parameter, gradient)

    hooks = [one.register_hook(hook_of(one)) for one in trained(recipe)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(
    recipe: GradientRecipe,
    micro: MicroBatch,
    step: Tensor,
    tokens: Tensor,
    *,
    documents: bool,
    micro_batches: int,
    last: bool,
) -> Tensor:
    """The loss of one of a step's `micro_batches`, detached, after its backward pass.

    `step`: its number, int64 []; `tokens`: valid ones of the step over all ranks, fp32 []; `documents`: whether rows
    hold several; `last`: the step's last micro-batch.
    """
    with (
        documents_known(documents),
        recipe.handle.micro_batch(seed=recipe.seed, step=step, rows=micro.rows, last=last),
    ):
        loss = recipe.loss_of(
            recipe.model,
            micro.input_ids,
            micro.labels,
            micro.position_ids,
            tokens,
            recipe.loss,
            micro_batches=micro_batches,
            **micro.extra,
        )
        # In this thread, on any device: an engine's own thread would not know the phase.
        with phase("backward"), torch.autograd.set_multithreading_enabled(False):
            # Not `backward()`, which would copy each gradient that somebody looks at.
            torch.autograd.grad(loss, list(trained(recipe)), allow_unused=True)
    return loss.detach()
