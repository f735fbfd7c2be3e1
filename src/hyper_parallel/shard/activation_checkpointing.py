"""Recomputation by layer: keep a layer's input, compute the layer again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Random numbers are functions of
the element, so no generator state needs saving.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.shard.dropout import draw_at_hand, drawing
from hyper_parallel.shard.hooks import Forward, wrap

_left = ContextVar("left_to_the_graph", default=False)


@contextlib.contextmanager
def left_to_the_graph() -> Iterator[None]:
    """Inside, layers are computed once: whoever captures the step has its graph compute them again (`graph.layers`),
    each operator as late as possible and only what is needed."""
    token = _left.set(True)
    try:
        yield
    finally:
        _left.reset(token)


def apply_recompute(layers: nn.ModuleList) -> None:
    """Recompute each of `layers` in the backward pass."""
    for layer in layers:
        wrap(layer, _recomputed)


def _recomputed(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    if _left.get() or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    draw = draw_at_hand()

    def compute(*args: Any, **kwargs: Any) -> Any:
        # The backward pass may run outside of what the forward pass ran in, and in another thread.
        with drawing(draw) if draw is not None else contextlib.nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
