"""How many parameters a rank holds: of a layer, of its experts, of the embedding and the head.

    attention  h d (H + 2 K) + H d h, or of latent attention h q + q H (a + r) + h (c + r) + c H (a + v) + H v h
    MLP        (2 + gated) h f
    mixers     h i + n h + the rest, with i columns in and n rows out (`workload.mixers`)
    experts    E (2 + gated) l f_e and 2 h l, where l is the width that experts take, h unless it is projected; over
               the ranks of `expert`; the tensor axes split what those do not

Norms and biases, a few thousandths, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.cost_model.dims import attending, dense_share, expert_width, mixing, routed_share
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

    def all(self) -> Array:
        """Of a mean layer, experts included."""
        return self.layer + self.experts


def attention_parameters(t: Table) -> Array:
    """Of one layer, whole."""
    plain = t.hidden * (t.head_dim * (2 * t.heads + 2 * t.kv_heads) + t.gate)
    if not np.any(t.key_rank > 0):
        return plain
    wide = t.heads * (t.plain + t.rotary)
    queries = np.where(t.query_rank > 0, t.query_rank * (t.hidden + wide), t.hidden * wide)
    latent = queries + t.hidden * (t.key_rank + t.rotary)
    latent = latent + t.key_rank * t.heads * (t.plain + t.value) + t.heads * t.value * t.hidden
    latent = latent + t.hidden * t.gate
    return np.where(t.key_rank > 0, latent, plain)


def mixer_parameters(t: Table) -> Array:
    """Of one layer's other token mixer, whole; 0 without one."""
    return t.hidden * (t.mixer_inputs + t.mixer_inner) + t.mixer_rest


def mixing_parameters(t: Table) -> Array:
    """Of a mean layer's attention and other token mixer, whole."""
    found = attending(t) * attention_parameters(t)
    return found + mixing(t) * mixer_parameters(t) if np.any(t.mixer_layers > 0) else found


def held(t: Table) -> ParameterCounts:
    """On one rank of tensor and expert axes."""
    tensor = t.tensor_x * t.tensor_y
    routed = routed_share(t)
    wide = (2 + t.gated) * t.hidden
    latent = 2 * t.hidden * t.expert_hidden
    dense = wide * (dense_share(t) * t.ffn + routed * t.shared_ffn) + routed * latent
    features = (2 + t.gated) * expert_width(t) * t.expert_ffn
    experts = routed * features * t.experts / np.maximum(t.expert, 1.0)
    # Where nothing spreads experts, the tensor axes split their features.
    experts = experts / np.where(t.expert * t.expert_tensor > 1, t.expert_tensor, tensor)
    return ParameterCounts(
        (mixing_parameters(t) + dense + adapters(t)) / tensor, experts, t.vocabulary * t.hidden / tensor
    )


def adapters(t: Table) -> Array:
    """Of a mean layer's adapters (arXiv 2106.09685), whole; 0 without them."""
    return t.adapter_rank * (t.adapter_inputs + t.adapter_outputs)


def trained(t: Table, counts: ParameterCounts) -> ParameterCounts:
    """Those of what a rank holds that have gradients: all, or the adapters alone."""
    if not np.any(t.frozen > 0):
        return counts
    learns = 1 - t.frozen
    own = np.where(t.frozen > 0, adapters(t) / (t.tensor_x * t.tensor_y), counts.layer)
    return ParameterCounts(own, learns * counts.experts, learns * counts.embedding)


def layer_matrices(t: Table) -> Array:
    """Elements that a token is multiplied with in a mean layer: those of the experts that it goes through."""
    wide = (2 + t.gated) * t.hidden
    return mixing_parameters(t) + routed_share(t) * _chosen(t) + dense_share(t) * wide * t.ffn


def module_matrices(t: Table) -> Array:
    """The same of a module that predicts one token more: attention, and experts where the model has them."""
    mlp = np.where(t.experts > 0, _chosen(t), (2 + t.gated) * t.hidden * t.ffn)
    return attention_parameters(t) + mlp


def _chosen(t: Table) -> Array:
    """A layer's router, shared experts, and the experts that a token goes through."""
    routed = (2 + t.gated) * expert_width(t) * t.chosen * t.expert_ffn
    shared = (2 + t.gated) * t.hidden * t.shared_ffn
    return routed + shared + t.hidden * (t.experts + 2 * t.expert_hidden)
