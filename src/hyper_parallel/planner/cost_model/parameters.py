"""How many parameters a rank holds: of a layer, of its experts, of the embedding and the head.

    attention  h d (H + 2 K) + H d h, or of latent attention h q + q H (a + r) + h (c + r) + c H (a + v) + H v h
    MLP        (2 + gated) h f
    experts    E (2 + gated) h f_e, over the ranks of `expert`; the tensor axes split what those do not

Norms and biases, a few thousandths, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.cost_model.dims import routed_share
from hyper_parallel.planner.table import Array, Table


@dataclass(frozen=True)
class ParameterCounts:
    """Elements that a rank holds before any sharding over data."""

    layer: Array
    """Of a mean layer, experts apart."""
    experts: Array
    """Routed experts of a mean layer."""
    embedding: Array
    """Of the embedding, or of the head."""


def attention_parameters(t: Table) -> Array:
    """Of one layer, whole."""
    plain = t.hidden * t.head_dim * (2 * t.heads + 2 * t.kv_heads)
    if not np.any(t.key_rank > 0):
        return plain
    wide = t.heads * (t.plain + t.rotary)
    queries = np.where(t.query_rank > 0, t.query_rank * (t.hidden + wide), t.hidden * wide)
    latent = queries + t.hidden * (t.key_rank + t.rotary)
    latent = latent + t.key_rank * t.heads * (t.plain + t.value) + t.heads * t.value * t.hidden
    return np.where(t.key_rank > 0, latent, plain)


def held(t: Table) -> ParameterCounts:
    """On one rank of tensor and expert axes."""
    tensor = t.tensor_x * t.tensor_y
    routed = routed_share(t)
    wide = (2 + t.gated) * t.hidden
    dense = wide * ((1 - routed) * t.ffn + routed * t.shared_ffn)
    experts = routed * wide * t.expert_ffn * t.experts / np.maximum(t.expert, 1.0)
    # Where nothing spreads experts, the tensor axes split their features.
    experts = experts / np.where(t.expert * t.expert_tensor > 1, t.expert_tensor, tensor)
    return ParameterCounts(
        (attention_parameters(t) + dense) / tensor, experts, t.vocabulary * t.hidden / tensor
    )
