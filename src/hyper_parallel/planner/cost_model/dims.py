"""Sizes that follow from a table's columns: bytes of elements, shares of layers, and the parameters of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.table import PRECISIONS, Array, Table

_EIGHT = [PRECISIONS.index(name) for name in ("fp8", "mxfp8")]
_FOUR = [PRECISIONS.index(name) for name in ("nvfp4",)]


FORMAT_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element of formats below 16 bits. `fp8` has one scale for a tensor; MXFP8 one of 8 bits for each 32
elements (OCP Microscaling Formats, 2023, section 5); NVFP4 one of 8 bits for each 16 (arXiv 2509.25149, section 2)."""

KEPT_BESIDE = {"mxfp8": 2 / 32, "nvfp4": 2 * (1 / 2 + 1 / 16)}
"""Bytes of a weight's copies for both directions of its product, beyond the 2 of a 16-bit weight: 8-bit primary weights
take its place, and what is more are MXFP8's scales; a 4-bit copy lies beside it (Transformer Engine has no 4-bit
primary weights)."""


def element_bytes(t: Table) -> Array:
    """Bytes of an activation's element."""
    return np.where(t.precision == PRECISIONS.index("fp32"), 4.0, 2.0)


def split_outside(t: Table) -> npt.NDArray[np.bool_]:
    """Where tensor axes split what lies between a layer's blocks: with sequence parallelism, and with two of them."""
    return np.asarray((t.sequence_parallel > 0) | (t.tensor_y > 1), dtype=np.bool_)


def product_bytes(t: Table) -> Array:
    """Bytes that a product keeps of an element of its input, with its part of a block's scaling factor."""
    few = np.array([FORMAT_BYTES.get(name, 0.0) for name in PRECISIONS])[t.precision.astype(np.intp)]
    return np.where(few > 0, few, element_bytes(t))


def copy_bytes(t: Table) -> Array:
    """Bytes of a linear layer's weight that a format below 16 bits keeps beside its 2."""
    beside = np.array([KEPT_BESIDE.get(name, 0.0) for name in PRECISIONS])
    return beside[t.precision.astype(np.intp)]


def routed_share(t: Table) -> Array:
    """The share of the layers that have experts, 0 to 1."""
    return np.where(t.experts > 0, (t.mlp_layers - t.dense_layers) / t.layers, 0.0)


def dense_share(t: Table) -> Array:
    """The share of the layers that have an MLP without experts, 0 to 1."""
    return t.mlp_layers / t.layers - routed_share(t)


def expert_share(t: Table) -> Array:
    """The share of the layers behind the dense ones that has experts: 1 unless blocks have either mixer or MLP."""
    behind = np.maximum(t.layers - t.dense_layers, 1.0)
    return np.where(t.experts > 0, (t.mlp_layers - t.dense_layers) / behind, 1.0)


def attending(t: Table) -> Array:
    """The share of the layers that have softmax attention, 0 to 1."""
    return t.attention_layers / t.layers


def mixing(t: Table) -> Array:
    """The share of the layers that have another token mixer, 0 to 1."""
    return t.mixer_layers / t.layers


def blocks(t: Table) -> Array:
    """Blocks of a mean layer, each with a norm and a sum into the hidden state; 2 with attention and an MLP."""
    return (t.attention_layers + t.mixer_layers + t.mlp_layers) / t.layers


def expert_width(t: Table) -> Array:
    """Features of a token that routed experts take and give."""
    return np.where(t.expert_hidden > 0, t.expert_hidden, t.hidden)


def keys_seen(t: Table) -> Array:
    """Keys that a query sees: the mean over a causal sequence, and over layers with a window and without."""
    whole = t.sequence / 2
    window = np.minimum(t.window, t.sequence)
    near = window - window * window / (2 * t.sequence)
    return whole + t.windowed * (near - whole)


def in_eight_bits(t: Table) -> npt.NDArray[np.bool_]:
    """Where linear layers multiply in 8 bits."""
    return np.isin(t.precision, _EIGHT)


def in_four_bits(t: Table) -> npt.NDArray[np.bool_]:
    """Where linear layers multiply in 4 bits."""
    return np.isin(t.precision, _FOUR)


# How many parameters a rank holds: of a layer, of its experts, of the embedding and the head.
#
#     attention  h d (H + 2 K) + H d h, or of latent attention h q + q H (a + r) + h (c + r) + c H (a + v) + H v h
#     MLP        (2 + gated) h f
#     mixers     h i + n h + the rest, with i columns in and n rows out (`workload.mixers`)
#     experts    E (2 + gated) l f_e and 2 h l, where l is the width that experts take, h unless it is projected; over
#                the ranks of `expert`; the tensor axes split what those do not
#
# Norms and biases, a few thousandths, are left out.


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
        """Parameters of a mean layer, experts included."""
        return self.layer + self.experts


def attention_parameters(t: Table) -> Array:
    """Parameters of one layer's attention, whole."""
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
    """Parameters of one layer's other token mixer, whole; 0 without one."""
    return t.hidden * (t.mixer_inputs + t.mixer_inner) + t.mixer_rest


def mixing_parameters(t: Table) -> Array:
    """Parameters of a mean layer's attention and other token mixer, whole."""
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
    """Parameters of a mean layer's adapters (arXiv 2106.09685), whole; 0 without them."""
    return t.adapter_rank * (t.adapter_inputs + t.adapter_outputs)


def trained(t: Table, counts: ParameterCounts) -> ParameterCounts:
    """The parameters of a rank that have gradients: all, or the adapters alone."""
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
