"""Activation checkpointing in eager steps: keep a layer's input, compute the layer again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Random numbers are functions of
the element, so no generator state needs saving. Selective checkpointing keeps what `graph.selective_recompute` keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_parallel.graph.matmuls import is_expensive
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.model_structure import layers_or_refuse
from hyper_parallel.strategy import Strategy, recomputed_layers, recomputes

_COLLECTIVES = "_c10d_functional"


def recomputed_modules(
    model: nn.Module, strategy: Strategy, counts: Sequence[int] | None = None
) -> list[str]:
    """The names of the layers that the strategy recomputes. `counts`: the layers of each stage of a pipeline.

    Raises StrategyError for a model without a list of layers, and for more layers than there are.
    """
    memory = strategy.memory
    if not recomputes(memory):
        return []
    name, found = layers_or_refuse(model, f"memory.recompute: {memory.recompute}")
    return [f"{name}.{index}" for index in recomputed_layers(memory, counts or [len(found)])]


def apply_recompute(layers: Iterable[nn.Module], selective: bool) -> None:
    """Recompute each of `layers` in the backward pass: all of it, or what `_policy` does not keep."""
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        wrap(layer, partial(_recomputed, options))


def _recomputed(options: dict[str, Any], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    context = current_step()
    if context.recompute_in_graph or not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # The backward pass may run outside of what the forward pass ran in, and in another thread.
        with context.installed():
            return forward(*args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _policy(_context: Any, op: Any, *args: Any, **_options: Any) -> CheckpointPolicy:
    """Of an operator that runs in a layer's forward pass, whether its results are kept."""
    namespace, _, rest = op._schema.name.partition("::")
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    kept = namespace == _COLLECTIVES or is_expensive(rest.removesuffix("_"), shapes)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
