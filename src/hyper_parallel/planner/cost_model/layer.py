"""One transformer layer on one rank, forward and backward, for a micro-batch of T = micro · sequence / context tokens.

Products, in the shapes that a rank of the tensor axes (P = x · y of them) multiplies:

    attention   [T, h] · [h, (H + 2K) d / P]  and  [T, H d / P] · [H d / P, h]         `_projections`
    MLP         [T, h] · [h, (1 + gated) f / P]  and  [T, f / P] · [f / P, h]          `_dense`
    experts     E / expert of them, each with its share of T · chosen rows             `_routed`
                and f_e / expert_tensor features; the fullest rank's share where routing is not forced to be even

    others      mixers of tokens beside attention (`mixers`)

Each part counts for the share of the layers that have it. A backward pass multiplies twice as much; where the model is
frozen and adapters are trained, once, beside the adapters' three products (arXiv 2106.09685). Multi-head latent
attention (arXiv 2405.04434, section 2.1) has its own five products. Attention's scores and sums over values are 2 T H
(d_qk + d_v) / P · K(S) FLOPs forward, K(S) the keys that a query sees on average (`workload.work`), 2.5 times as many
backward (Dao, arXiv 2307.08691, section 3.1), at a rate by architecture (`FUSED`). Without a fused kernel the scores
also go through memory seven times.

Elementwise operators are counted in bytes: norms, residuals and their gradients nine times the hidden state, split
over P where the sequence is; activations of the MLP as wide as its features; rotations of queries and keys; biases of
routed experts (`BIASES`). Linear layers of 8 and 4 bits read their inputs once more to scale them, and experts copy
their rows to multiples of 16 (`PADDED`).

Host: a layer's kernels cost the host `launch` each (`_kernels`); where that is longer than the device is busy, it is
what a pass takes, and where both are near a pass takes longer than either (`_longer`); exchanges of experts run while
the host launches what is behind them, and other collectives come on top, since ranks wait for the slowest host.
Recorded graphs, which hold attention and routers but not the experts, take the place of RECORDED of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.columns import ARCHITECTURES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import (
    attending,
    blocks,
    dense_share,
    expert_width,
    keys_seen,
    mixing,
    routed_share,
    split_outside,
)
from hyper_parallel.planner.cost_model.layer_collectives import Exchanged, exchanged, experts_sent, load
from hyper_parallel.planner.cost_model.operators import Products, Ranks, moved
from hyper_parallel.planner.table import PRECISIONS, Array, Table

FUSED = {
    "volta": 0.30,
    "ampere": 0.60,
    "hopper": 0.50,
    "blackwell": 0.45,
    "blackwell-ultra": 0.45,
    "ascend": 0.55,
}
"""Shares of the 16-bit peak that fused attention reaches forward and backward together: FlashAttention-2 on A100
(arXiv 2307.08691, figure 5), FlashAttention-2 and 3 on H100 (2407.08608, figures 5 and 6), kernels of SimuMax's
tables on B200; Ascend's is an estimate."""

SINCE_HOPPER = ("hopper", "blackwell", "blackwell-ultra")
OF_SECOND = 0.6
"""The share of these rates that FlashAttention-2 reaches since Hopper: 0.35 of the peak forward (arXiv 2407.08608,
abstract) and 0.28 backward, in the A100's proportion, as the presets have it: 0.3 of both together."""

BACKWARD_BYTES = 1.6
"""Bytes of the backward pass of elementwise operators to those of the forward pass."""
BACKWARD_LAUNCHES = 1.7
FUSED_ROUTING = 0.5
"""Launches of routing that fused routers and permutations take the place of."""
BIASES = (6.0, 64.0)
"""Bytes that the bias of an expert's result reads and writes of each element, forward and backward: in one operator in
16 bits (read and written; its gradient read to be summed), and expert by expert in float32 (`Profile.bias_by_expert`).
The latter writes bias · probability (4), adds it (6 read, 4 written), joins the experts' rows (8) and casts them (6);
backward it casts twice (12) and multiplies and sums for the gradients of bias and probability (12 each)."""
PADDED = 8.0
"""Bytes that an element of a routed row costs, forward, where experts multiply in 8 or 4 bits: rows of each expert are
copied to a multiple of 16 or 32 of them, and the result back (Transformer Engine's `Fp8Padding` in Megatron Core's
`TEGroupedMLP`). Libraries that send a token to a node once can do so as they sort its rows (HybridEP)."""
RECORDED = 0.7
"""Launches of a layer that recorded graphs take the place of: those of attention, router and preprocessing (the scope
of Megatron-Bridge's recipes), but not of experts and exchanges."""
ADAPTER_LAUNCHES = 20.0
"""Kernels of a layer's adapters: two products and a sum of each of about seven linear layers."""


@dataclass(frozen=True)
class Layer:
    """Seconds of a layer's passes on one rank; each column is the mean over the model's layers."""

    products: Array
    """Forward: matrix products of linear layers and experts."""
    products_backward: Array
    weights: Array
    """Backward: those of the weights' gradients, which no other layer waits for."""
    attention: Array
    """Forward: attention, and the recurrences of other token mixers."""
    elementwise: Array
    launches: Array
    """The host's, forward."""
    apart: Exchanged
    """What collectives add, and what goes beside."""
    forward: Array
    backward: Array
    again: Array
    """What is computed once more before the backward pass."""
    sent: Array
    """Exchanges of experts in each pass, hidden or not, where the order of collectives is searched (`Profile.ordered`);
    else 0."""

    @property
    def hidden(self) -> Array:
        """Seconds that go beside the pass."""
        return np.maximum(self.sent - self.apart.expert, 0.0) + self.apart.beside


def layer(t: Table, k: Constants, ranks: Ranks) -> Layer:
    """A layer of each configuration."""
    tokens = t.micro * t.sequence / t.context
    with_experts = routed_share(t)
    multiply = Products(t, k)
    products = attending(t) * _projections(t, ranks, multiply, tokens)
    products = products + dense_share(t) * _mlp(t.ffn, t, ranks, multiply, tokens)
    shared: Array = np.zeros(1)
    if np.any(t.experts > 0):
        shared = _mlp(t.shared_ffn, t, ranks, multiply, tokens)
        products = products + with_experts * (_routed(t, k, ranks, multiply, tokens) + shared)
    attention, unfused = (attending(t) * part for part in _attention(t, k, ranks, tokens))
    elementwise = moved(t, k, _bytes(t, k, ranks, tokens, with_experts)) * k.elementwise
    elementwise = elementwise * k.unfused ** (1 - t.fused) + unfused
    if np.any(t.expert_bias > 0):
        elementwise = elementwise + moved(t, k, with_experts * _biased(t, k, ranks, tokens))
    own: Array = np.zeros(1)
    if np.any(t.mixer_layers > 0):
        products = products + mixing(t) * projected(t, ranks.tensor, multiply, tokens)
        scan, besides = scanned(t, k, ranks.tensor, tokens, _fused_rate(t, k))
        attention = attention + mixing(t) * scan
        elementwise = elementwise + mixing(t) * besides
    products, attention = products * t.products_ratio, attention * t.attention_ratio
    elementwise = elementwise * t.elementwise_ratio * (1 + t.unsplit * (ranks.tensor - 1))
    elementwise = elementwise + t.kernel_seconds / (1 + BACKWARD_BYTES)
    if np.any(t.frozen > 0):
        own = _adapters(t, ranks, multiply, tokens)
        elementwise = elementwise + moved(t, k, 6 * tokens * t.adapter_outputs / ranks.tensor)
    scaled = moved(t, k, _scaled(t, ranks, tokens, with_experts))
    busy = products + own + attention + elementwise + scaled
    apart = exchanged(t, k, ranks, tokens, with_experts, attention, busy)
    if np.any(t.shared_beside > 0):
        # The backward pass takes twice as long, and an exchange's seconds are the mean of both passes.
        aside = t.shared_beside * np.minimum(1.5 * with_experts * shared, apart.expert)
        apart = replace(apart, expert=apart.expert - aside)
    launches = _kernels(t, k, ranks, with_experts) * k.launch * np.where(on_grace(t), k.grace, 1.0)
    products_backward = (2 - t.frozen) * products + 2 * own
    back = products_backward + 2.5 * attention + BACKWARD_BYTES * (elementwise + scaled)
    forward = _longer(k, busy + apart.expert, launches) + apart.forward - apart.expert
    backward = _longer(k, back + apart.expert, BACKWARD_LAUNCHES * launches) + apart.backward - apart.expert
    once_more = forward
    if np.any((t.stops > 0) & (t.recompute == 2)):
        spared = dense_share(t) * multiply(tokens, t.hidden, t.ffn / ranks.tensor)
        needed = busy - t.stops * spared + apart.expert * (1 - 0.5 * t.stops)
        once_more = _longer(k, needed, launches) + apart.forward - apart.expert
    again = np.where(
        t.recompute == 2, once_more, np.where(t.recompute == 1, unfused + 0.2 * elementwise, 0.0)
    )
    return Layer(
        products + own,
        products_backward,
        (1 - t.frozen) * products + own,
        attention,
        elementwise + scaled,
        launches,
        apart,
        forward,
        backward,
        again * t.recomputed,
        sent(t, k, ranks),
    )


def sent(t: Table, k: Constants, ranks: Ranks) -> Array:
    """`Layer.sent`."""
    if not np.any((t.ordered > 0) & (ranks.of_experts > 1)):
        return np.zeros(1)
    each = experts_sent(t, k, ranks, t.micro * t.sequence / t.context)
    return np.where(ranks.of_experts > 1, t.ordered * routed_share(t) * each, 0.0)


def on_grace(t: Table) -> npt.NDArray[np.bool_]:
    """Where the host is a Grace, as in the racks that are a supernode of Blackwells."""
    blackwell = [ARCHITECTURES.index(name) for name in ("blackwell", "blackwell-ultra")]
    return np.isin(t.architecture, blackwell) & (t.supernode > 1)


def _longer(k: Constants, device: Array, host: Array) -> Array:
    """Seconds of a pass in which the device is busy for `device` seconds and the host launches for `host`.

    The longer of both, and more where they are near: the host falls behind in stretches of short kernels, and what it
    gains beside long ones does not make up for all of it. Where both are equal, 2^(1 / `stretches`) times either.
    """
    both: Array = np.maximum(device, host)
    return both * ((device / both) ** k.stretches + (host / both) ** k.stretches) ** (1 / k.stretches)


def _adapters(t: Table, ranks: Ranks, multiply: Products, tokens: Array) -> Array:
    """Adapters of a mean layer, forward."""
    into = multiply(tokens, t.adapter_rank, t.adapter_inputs / ranks.tensor)
    out = multiply(tokens, t.adapter_outputs / ranks.tensor, t.adapter_rank)
    return np.where(t.frozen > 0, into + out, 0.0)


def _projections(t: Table, ranks: Ranks, multiply: Products, tokens: Array) -> Array:
    heads = t.heads / ranks.tensor
    keys = np.maximum(t.kv_heads / ranks.tensor, 1.0)
    has_latent = t.key_rank > 0
    plain: Array = np.zeros(1)
    if not np.all(has_latent):
        gate = t.gate / ranks.tensor
        plain = multiply(tokens, (heads + 2 * keys) * t.head_dim + gate, t.hidden)
        plain = plain + multiply(tokens, t.hidden, heads * t.head_dim)
    if not np.any(has_latent):
        return plain
    wide = heads * (t.plain + t.rotary)
    queries = np.where(
        t.query_rank > 0,
        multiply(tokens, t.query_rank, t.hidden) + multiply(tokens, wide, t.query_rank),
        multiply(tokens, wide, t.hidden),
    )
    latent = queries + multiply(tokens, t.key_rank + t.rotary, t.hidden)
    latent = latent + multiply(tokens, heads * (t.plain + t.value), t.key_rank)
    latent = latent + multiply(tokens, t.hidden, heads * t.value)
    return np.where(has_latent, latent, plain)


def _mlp(features: Array, t: Table, ranks: Ranks, multiply: Products, tokens: Array) -> Array:
    """An MLP that all tokens go through, split over the tensor axes."""
    features = features / ranks.tensor
    return multiply(tokens, (1 + t.gated) * features, t.hidden) + multiply(tokens, t.hidden, features)


def _routed(t: Table, k: Constants, ranks: Ranks, multiply: Products, tokens: Array) -> Array:
    """Routed experts of a layer, forward."""
    held = np.maximum(t.experts / t.expert, 1.0)
    # Where nothing spreads experts, the tensor axes split their features.
    split = np.where(ranks.of_experts > 1, t.expert_tensor, ranks.tensor)
    rows, width = tokens * t.chosen / ranks.tensor * split / held, expert_width(t)
    features, latent = t.expert_ffn / split, t.expert_hidden / ranks.tensor
    one = multiply(rows, (1 + t.gated) * features, width) + multiply(rows, width, features)
    besides = multiply(tokens, latent, t.hidden) + multiply(tokens, t.hidden, latent)
    return held * one * k.grouped * load(t, k) + besides


def _fused_rate(t: Table, k: Constants) -> Array:
    """FLOP/s of fused attention by the best kernels."""
    rate: Array = t.peak16 * best_attention_share(t) * k.attention
    return rate


def best_attention_share(t: Table) -> Array:
    """The share of the 16-bit peak that the best kernels of fused attention reach, by their makers' figures."""
    return np.array([FUSED.get(name, 0.5) for name in ARCHITECTURES])[t.architecture.astype(np.intp)]


def attention_quality(t: Table) -> Array:
    """The rate of the framework's fused attention beside that of the best kernels."""
    quality = np.where((t.flash > 0) & (t.flash < 1), t.flash, 1.0)
    since = np.isin(t.architecture, [ARCHITECTURES.index(name) for name in SINCE_HOPPER])
    return np.where((t.flash == 2) & since, OF_SECOND, quality)


def _attention(t: Table, k: Constants, ranks: Ranks, tokens: Array) -> tuple[Array, Array]:
    """Seconds of attention's arithmetic, and of its scores' way through memory where no kernel fuses them."""
    heads = t.heads / ranks.tensor
    width = np.where(t.key_rank > 0, t.plain + t.rotary + t.value, 2 * t.head_dim)
    flops = 2 * tokens * heads * width * keys_seen(t)
    seconds = flops / (_fused_rate(t, k) * attention_quality(t))
    scores = t.micro * heads * t.sequence**2 / t.context
    return seconds, np.where(t.flash > 0, 0.0, moved(t, k, 2 * 7 * scores))


def _bytes(t: Table, k: Constants, ranks: Ranks, tokens: Array, with_experts: Array) -> Array:
    """Bytes read and written by a layer's elementwise operators, forward, 2 an element."""
    outside = np.where(split_outside(t), tokens / ranks.tensor, tokens)
    # Rows are sorted by rank, then by expert, and back; libraries that send one a node sort by rank as they send.
    sorted_rows = 8 * expert_width(t) * k.permute * (1 - 0.5 * t.dedup)
    # An activation reads its input, and the gate where there is one, and writes its result.
    passed = 2 + t.gated
    routed = t.chosen * (passed * t.expert_ffn + sorted_rows) * load(t, k) + passed * t.shared_ffn
    wide = (with_experts * routed + dense_share(t) * passed * t.ffn) / ranks.tensor
    turned = attending(t) * 3 * (t.heads * t.head_dim + t.gate) / ranks.tensor
    return 2 * (4.5 * blocks(t) * outside * t.hidden + tokens * wide + tokens * turned)


def _biased(t: Table, k: Constants, ranks: Ranks, tokens: Array) -> Array:
    """Bytes of the biases of a layer's routed experts, forward: what the backward pass has `BACKWARD_BYTES` of."""
    joined, by_expert = BIASES
    each = (joined + (by_expert - joined) * t.bias_by_expert) / (1 + BACKWARD_BYTES)
    return t.expert_bias * each * tokens * t.chosen / ranks.tensor * expert_width(t) * load(t, k)


def _scaled(t: Table, ranks: Ranks, tokens: Array, with_experts: Array) -> Array:
    """Bytes of scaling the inputs of linear layers into fewer bits."""
    few = t.precision >= PRECISIONS.index("fp8")
    if not few.any():
        return np.zeros(1)
    outside = np.where(split_outside(t), tokens / ranks.tensor, tokens)
    routed = t.chosen * (t.expert_ffn + expert_width(t))
    wide = with_experts * routed + dense_share(t) * t.ffn + attending(t) * t.heads * t.head_dim
    wide = wide + mixing(t) * t.mixer_inner
    scales = np.where(t.precision > PRECISIONS.index("fp8"), 1.3, 1.0)
    padded = with_experts * PADDED * (1 - t.dedup) * t.chosen * expert_width(t) * tokens / ranks.tensor
    return np.where(
        few, 4 * scales * (blocks(t) * outside * t.hidden + tokens * wide / ranks.tensor) + padded, 0.0
    )


def _kernels(t: Table, k: Constants, ranks: Ranks, with_experts: Array) -> Array:
    """Launches of a layer's forward pass."""
    plain = np.where(t.fused >= 1, 22.0, 34.0) + np.where(t.key_rank > 0, 10.0, 0.0)
    # Half are those of a block, whatever it has.
    plain = plain * blocks(t) / 2 + mixing(t) * SCAN_LAUNCHES
    plain = plain + np.where(t.frozen > 0, ADAPTER_LAUNCHES, 0.0)
    routing = k.routing * (1 - FUSED_ROUTING * t.fused_routing)
    # A product and a sum for each expert held, joined and cast; they are no part of recorded graphs.
    held = np.maximum(t.experts / t.expert, 1.0)
    biases = with_experts * t.expert_bias * (1 + (2 * held + 1) * t.bias_by_expert)
    return (plain + with_experts * routing) * (1 - RECORDED * t.graphs) + biases


# Token mixers beside attention on one rank: Mamba, delta rules, linear attention, short convolutions.
#
#     products   [T, h] · [h, i / P],  [T, n / P] · [n / P, h]  and those of other matrices        `projected`
#     scan       max(FLOPs / (peak16 · FUSED · SCANNED), bytes / (hbm · memory))                   `scanned`
#     reference  FLOPs / (peak16 · REFERENCE) + bytes / (hbm · memory)
#
# with i columns in, n rows out and P ranks of the tensor axes, over which heads are split. FLOPs and bytes are those of
# `workload.mixers`; the bytes are those of the reference code where a framework has no kernels that fuse the scan
# (`scans` is 0), which then takes the sum of both, since its products and its elementwise operators follow each other.

SCANNED = 0.5
"""The rate of chunked scans to that of fused attention: their products are of a chunk and a head, 64 to 256 a side, and
pass through memory between the kernels of a scan. An estimate; Mamba-2's scan is faster than FlashAttention-2 from
2,048 tokens on (arXiv 2405.21060, figure 10), for a state of 64, at a third of its FLOPs."""
REFERENCE = 1 / 200
"""The rate of reference code's products, in float32 and of 64 to 256 a side, to the 16-bit peak: on an H100 a fifteenth
for the format, and of that a thirteenth by the half lengths of `cluster.presets`. What the simulator says of it."""
SCAN_LAUNCHES = 10.0
"""Kernels of a fused mixer beyond those of an attention layer: the convolution and the five of a chunked scan
(2405.21060, section 6)."""


def projected(t: Table, ranks: Array, multiply: Products, tokens: Array) -> Array:
    """Seconds of a mixer's linear layers, forward."""
    inner = t.mixer_inner / ranks
    seconds = multiply(tokens, t.mixer_inputs / ranks, t.hidden) + multiply(tokens, t.hidden, inner)
    # Gates of a low rank go there and back.
    low = t.mixer_rest / np.maximum(t.mixer_inner, 1.0)
    return seconds + np.where(low >= 16, multiply(tokens, low, inner), 0.0)


def scanned(t: Table, k: Constants, ranks: Array, tokens: Array, rate: Array) -> tuple[Array, Array]:
    """Seconds of a mixer's recurrence, and of what reference code moves besides, forward.

    `rate` is fused attention's FLOP/s.
    """
    flops = tokens * t.mixer_scanned / ranks / (rate * SCANNED)
    fused = np.maximum(flops, moved(t, k, 2 * tokens * t.mixer_moved / ranks))
    products = tokens * t.mixer_reference_scanned / ranks / (t.peak16 * REFERENCE)
    besides = moved(t, k, 2 * tokens * t.mixer_reference / ranks)
    return np.where(t.scans > 0, fused, products), np.where(t.scans > 0, 0.0, besides)
