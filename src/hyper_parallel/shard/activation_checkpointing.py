"""Recomputation by layer: keep a layer's input, compute the layer again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Random numbers are functions of
the element, so no generator state needs saving.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap


def apply_recompute(layers: nn.ModuleList) -> None:
    """Recompute each of `layers` in the backward pass."""
    for layer in layers:
        wrap(layer, _recomputed)


def _recomputed(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    context = current_step()
    if context.recompute_in_graph or not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # The backward pass may run outside of what the forward pass ran in, and in another thread.
        with context.installed():
            return forward(*args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
