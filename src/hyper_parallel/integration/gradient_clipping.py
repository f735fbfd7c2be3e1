"""Clipping as trainers call it: `clip_grad_norm_(parameters, max_norm, norm_type)` of a sharded model's gradients."""

from __future__ import annotations

import math

from torch import Tensor

from hyper_parallel.errors import IntegrationError
from hyper_parallel.shard import ShardedModel


def clip_to_norm(handle: ShardedModel, max_norm: float, norm_type: float) -> Tensor:
    """The 2-norm of the whole gradient, fp32 [], before it is clipped to `max_norm`; an infinite one clips nothing.

    A collective. Raises IntegrationError for a norm other than the 2-norm.
    """
    if norm_type != 2:
        raise IntegrationError(f"gradients are clipped by their 2-norm; got norm_type={norm_type}")
    norm = handle.grad_norm()
    if math.isfinite(max_norm):
        handle.clip(norm, max_norm)
    return norm
