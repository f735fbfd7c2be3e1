"""Activation memory of a layer, in bytes per token of a micro-batch.

Korthikanti et al. (arXiv 2205.05198, section 4.1) count 34 s b h + 5 a s² b for GPT-3's layer: every input of a
product, of a norm and of an activation function, in 2 bytes, and masks of dropouts. The same count for today's
layers, with b bytes an element, c of what a product keeps of its input (`dims.FORMAT_BYTES` below 16 bits), d a
head's size, a and k heads of queries and of keys, e = features of an MLP, and P ranks of the tensor axes:

    norms          2 b h · o              their inputs                            `saved_activations`
    products       2 c h · g              inputs of attention's and of the MLP's first product
    attention      (b (a + 2k) d + b a d + 4 a) / P     queries, keys, values, result, sums     `_attention`
    ... unfused    b (a + k) d / P        queries and keys before they were rotated, in models with gates
    ... 8 bits     c a d / P              the result once more, as the next product keeps it
    no flash       5 a s / P              scores' softmax, its dropout and mask (2205.05198)    `_scores`
    MLP            (2 b + c) e / P        gate, up and their product; (b + c) e without a gate  `_wide`
    ... unfused    b e / P                the gate's activation
    experts        (c h + (2 b + c) e) chosen / P + 8 E       of each chosen expert; the router's scores and shares

o is 1/P with sequence parallelism or two tensor axes, else 1. g is o where a product gathers its input again for its
gradient (`regathers`; 2205.05198, section 4.2.2), else 1: it keeps the gathered one; the mean of both where it is not
known. Latent attention (arXiv 2405.04434, section 2.1) keeps its latents, which no tensor axis splits, and whole
queries, keys and values; where their parts are not put together by one kernel, these too. Another token mixer keeps
`Mixer.saved`, and its result as the input of its last product. Where the model is frozen, the input of a product is
kept only for an adapter. Selective recompute forgets the scores; full recompute all but the layer's input, and has
one layer at a time.

A micro-batch whose gradients of weights are put off holds, of each layer, the inputs of its products and the gradients
of their results.                                                                              `put_off_activations`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.columns import RECOMPUTE
from hyper_parallel.planner.cost_model.dims import (
    attending,
    element_bytes,
    expert_share,
    expert_width,
    mixing,
    product_bytes,
    split_outside,
)
from hyper_parallel.planner.table import Array, Table

SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclass(frozen=True)
class SavedActivations:
    """Bytes of a token of one layer, on one rank."""

    dense: Array
    """A layer without experts, after its recompute."""
    routed: Array
    """A layer with experts; zeros for models without them."""
    again: Array
    """What comes back while a layer is computed once more: the larger of both kinds; zeros without full recompute."""


def saved_activations(t: Table) -> SavedActivations:
    """Bytes that a layer keeps for each token of a micro-batch."""
    ranks = t.tensor_x * t.tensor_y
    size, narrow = element_bytes(t), product_bytes(t)
    outside = np.where(split_outside(t), 1 / ranks, 1.0)
    gathered = t.regathers * outside + (1 - t.regathers)
    first, second = _input_kept(t, t.adapted_attention), _input_kept(t, t.adapted_mlp)
    mixes, feeds = attending(t) + mixing(t), np.where(t.experts > 0, 1.0, t.mlp_layers / t.layers)
    shared = mixes * (size * outside + first * narrow * gathered) * t.hidden
    shared = shared + attending(t) * _attention(t, ranks)
    if np.any(t.mixer_layers > 0):
        shared = shared + mixing(t) * _mixer(t, ranks)
    scores = attending(t) * _scores(t, ranks)
    inputs = (size * outside + second * narrow * gathered) * t.hidden
    dense = shared + feeds * (inputs + _wide(t, t.ffn) / ranks)
    routed = np.zeros(1)
    if np.any(t.experts > 0):
        # Routed experts have no adapters.
        each = (1 - t.frozen) * narrow * expert_width(t) + _wide(t, t.expert_ffn, 1 - t.frozen)
        latent = (1 - t.frozen) * 2 * narrow * t.expert_hidden
        routed = (t.chosen * each + _wide(t, t.shared_ffn) + latent) / ranks + 8 * t.experts * outside
        routed = np.where(t.experts > 0, shared + expert_share(t) * (inputs + routed), 0.0)
    forgotten = np.where(t.recompute == SELECTIVE, t.recomputed, 0.0)
    whole = np.where(t.recompute == FULL, t.recomputed, 0.0)
    held = scores * (1 - forgotten)
    entry = size * t.hidden * outside

    def after(layer: Array) -> Array:
        left: Array = (1 - whole) * t.saved_ratio * (layer + held) + whole * entry
        return left

    routed_after = np.where(t.experts > 0, after(routed), 0.0)
    largest = np.where(t.experts > 0, np.maximum(routed, np.where(t.dense_layers > 0, dense, 0.0)), dense)
    return SavedActivations(
        after(dense), routed_after, np.where(whole > 0, t.saved_ratio * (largest + scores), 0.0)
    )


def _attention(t: Table, ranks: Array) -> Array:
    """Queries, keys, values, the result, and the sums of the softmax."""
    size, narrow = element_bytes(t), product_bytes(t)
    heads = t.heads / ranks
    keys = np.maximum(t.kv_heads / ranks, 1.0)
    # Models without gates add their positions, or bias the scores by them.
    rotated = np.where(t.fused >= 1, 0.0, t.gated * size * (heads + keys) * t.head_dim)
    again = np.where(narrow < size, narrow, 0.0) * _input_kept(t, t.adapted_output)
    plain: Array = size * (heads + 2 * keys) * t.head_dim + rotated + (size + again) * heads * t.head_dim
    # A gate keeps itself and its product with the result.
    plain = plain + 2 * size * t.gate / ranks
    if not np.any(t.key_rank > 0):
        return plain + 4 * heads
    whole = t.plain + t.rotary
    # Latents as they come and normalised; whole queries, keys and values, and what those were put together from.
    latents = (size + narrow) * (t.query_rank + t.key_rank) + size * t.rotary
    parts = np.where(t.fused >= 1, 0.0, whole + t.plain)
    latent = latents + heads * (size * (2 * whole + t.value + parts) + (size + again) * t.value)
    either: Array = np.where(t.key_rank > 0, latent, plain)
    return either + 4 * heads


def _scores(t: Table, ranks: Array) -> Array:
    """Where no kernel keeps them on the chip."""
    scores: Array = np.where(t.flash > 0, 0.0, 5 * t.heads / ranks * t.sequence)
    return scores


def _wide(t: Table, features: Array, kept: Array | None = None) -> Array:
    """`kept`: 1 where the last product's input is, 0 where its weights have no gradient."""
    size = element_bytes(t)
    activated = np.where(t.fused >= 1, 0.0, t.gated * size)
    last = _input_kept(t, t.adapted_down) if kept is None else kept
    wide: Array = ((1 + t.gated) * size + activated + last * product_bytes(t)) * features
    return wide


def _mixer(t: Table, ranks: Array) -> Array:
    """What another token mixer keeps; reference code keeps about half of the intermediates that it writes."""
    size, inner = element_bytes(t), t.mixer_inner / ranks
    fused = size * t.mixer_saved / ranks + _input_kept(t, t.adapted_output) * product_bytes(t) * inner
    written = size * np.maximum(t.mixer_reference - t.mixer_moved, 0.0) / 4 / ranks
    return np.where(t.scans > 0, fused, fused + written)


def _input_kept(t: Table, adapted: Array) -> Array:
    """1 where a product's input is kept for a weight's gradient: everywhere, or where an adapter is."""
    return np.where(t.frozen > 0, adapted, 1.0)


def put_off_activations(t: Table) -> tuple[Array, Array]:
    """Bytes of a token that a layer without experts, and one with, holds for the gradients of its weights alone."""
    ranks, size = t.tensor_x * t.tensor_y, element_bytes(t)
    outside = np.where(split_outside(t), 1 / ranks, 1.0)
    gathered = t.regathers * outside + (1 - t.regathers)
    # Of attention queries, keys, values and the result, or their gradients; of two norms what comes in and goes back.
    plain = _attention(t, ranks) + 4 * size * t.hidden * (gathered + outside)
    features = t.chosen * t.expert_ffn + t.shared_ffn
    rows = 2 * t.chosen * expert_width(t)
    dense = plain + size * (2 + t.gated) * t.ffn / ranks
    return dense, plain + size * ((2 + t.gated) * features + rows) / ranks
