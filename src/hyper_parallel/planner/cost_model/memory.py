"""Bytes of the fullest rank, by kind, and whether they fit. No number of the peak is fitted.

**State.** A parameter takes `weight_bytes`, its gradient `gradient_bytes`, its optimizer state `state_bytes`: 2 + 4 +
12 for AdamW in mixed precision with gradients summed in 32 bits, and 2 + 2 + 12 = 16 where they are not (ZeRO, arXiv
1910.02054, section 3.1; Megatron's distributed optimizer has 6 + 12 / d). ZeRO 1 splits the state over d = shard ·
context, 2 also the gradients, 3 also the parameters (section 5). Experts are held by fewer ranks and split over what
is left, d · P / expert of them. In 8 bits a weight is kept once for each direction of its product, in place of its 16
bits: as many bytes (Transformer Engine's 8-bit primary weights); scales of blocks, and 4-bit copies beside 16-bit
weights, are `dims.KEPT_BESIDE`.                                         (`_state`)

A frozen weight takes `frozen_bytes` and neither gradient nor state: those are of its adapters alone (arXiv 2106.09685,
section 4.2). A module that predicts one token more is a layer on the stage of the head, with a copy of the embedding
where that is on another.                                                                        (`_frozen`, `_modules`)

**Layers at work.** A framework that does not sum gradients within its products (`fused` is below 1) has each gradient
in the weights' format beside the sum; one that does still makes one of each shape, a layer's (Transformer Engine's
dummy gradients). ZeRO 3 has two layers gathered, the one at work and the next, and ZeRO 2 and 3 one layer's whole
gradient.

**Activations.** `activations.saved_activations` of each token and layer, and what goes to the next stage or into the
head, times the micro-batches that wait (`stages.waiting`).

**Put off.** In a zero-bubble schedule a micro-batch between its gradients of inputs and those of weights holds the
inputs of its products and the gradients of their results. Where gradients are reduced within the micro-batch (ZeRO 3),
all but the first of a stage's layers have made theirs by then, since collectives have one order: it holds these, whole
and reduced. The loss makes the gradient of the head's weight in the forward pass.             (`_put_off`, `_heads`)

**Head.** The last stage has `logit_bytes` of T · V / P logits, in full precision twice as many (2205.05198, 4.3).

**Work.** While a layer goes back its widest gradients exist, with sequence parallelism a gathered hidden state and its
gradient, with context parallelism the keys and values that come and go. They are not there while logits are: the
larger of both counts.                                                                                  (`_working`)

**Host.** What is on the host is not on the device, and has to fit there (`on_host`, HOST_PART of its bytes); the
buffers that its copies pass through are not counted.

**Fits.** An allocator reserves more than it has given out, and the driver's and the collectives' own buffers lie
outside of it: peak ≤ (capacity − outside) / slack (`Constants.usable`), and each stage has work (`fits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.columns import SCHEDULES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.activations import (
    SavedActivations,
    put_off_activations,
    saved_activations,
)
from hyper_parallel.planner.cost_model.dims import (
    adapters,
    blocks,
    copy_bytes,
    element_bytes,
    expert_share,
    expert_width,
    mixing_parameters,
    split_outside,
)
from hyper_parallel.planner.cost_model.pipeline import Stage, in_pairs, placed, stages
from hyper_parallel.planner.table import Array, Table, sum_of

_ZB_H1, _GPIPE = (SCHEDULES.index(name) for name in ("zb-h1", "gpipe"))

HOST_PART = 0.8
"""The part of the host's memory that a run may use: the rest is the system's, the data's and the framework's."""

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "working")
"""What the bytes of a rank are for; `gathered` are whole weights and gradients of the layers at work."""


def memory(t: Table) -> dict[str, Array]:
    """Bytes of the fullest rank by kind of KINDS; their sum is its peak of allocated bytes."""
    counted = by_stage(t)
    if len(counted) == 1:
        return counted[0]
    peaks = np.stack([np.broadcast_to(sum_of(kinds), t.n) for kinds in counted])
    fullest = np.argmax(peaks, axis=0)
    return {
        kind: np.choose(fullest, [np.broadcast_to(kinds[kind], t.n) for kinds in counted]) for kind in KINDS
    }


def by_stage(t: Table) -> list[dict[str, Array]]:
    """Bytes by kind of KINDS of a rank of each stage that may be the fullest (`stages`)."""
    held, per_token = _held(t), saved_activations(t)
    return [_counted(t, stage, held, per_token) for stage in stages(t)]


def fits(t: Table, peak: Array, k: Constants) -> npt.NDArray[np.bool_]:
    """Whether a peak of allocated bytes fits the device, what is moved fits the host, and every stage has work."""
    on_device = (peak <= k.usable(t.capacity)) & placed(t)
    return np.asarray(on_device & (on_host(t) <= t.host_bytes * HOST_PART), dtype=np.bool_)


def on_host(t: Table) -> Array:
    """Bytes of the rank with most of them in the host's memory."""
    moved = (t.state_on_host > 0) | (t.activations_on_host > 0) | (t.weights_on_host > 0)
    if not np.any(moved):
        return np.zeros(1)
    here = t.replaced(state_on_host=0.0, activations_on_host=0.0, weights_on_host=0.0)
    most: Array = np.zeros(1)
    for kinds in by_stage(here):
        found = t.state_on_host * kinds["optimizer"] + t.activations_on_host * kinds["activations"]
        found = found + t.weights_on_host * (kinds["parameters"] + kinds["gradients"])
        most = np.maximum(most, found)
    return most


def handed(t: Table) -> Array:
    """Bytes that one micro-batch leaves on a rank for its backward pass, on the device and the host together."""
    here = t.replaced(activations_on_host=0.0)
    per_token, most = saved_activations(here), np.zeros(1)
    for stage in stages(here):
        most = np.maximum(most, stage.dense * per_token.dense + stage.routed * per_token.routed)
    return most * t.micro * t.sequence / t.context


@dataclass(frozen=True)
class _Held:
    """Elements that a rank holds of a layer, before any sharding over data."""

    dense: Array
    """Of a layer without experts."""
    besides: Array
    """Of a layer with experts, these apart."""
    experts: Array
    expert: Array
    """Of one expert."""
    table: Array
    """Of the embedding, or of the head."""
    adapters: Array
    """Of a mean layer's adapters, which are trained in place of all else."""


def _held(t: Table) -> _Held:
    ranks = t.tensor_x * t.tensor_y
    wide = (2 + t.gated) * t.hidden
    mixes = mixing_parameters(t) / ranks + blocks(t) * t.hidden
    feeds = np.where(t.experts > 0, 1.0, t.mlp_layers / t.layers)
    routed = expert_share(t)
    features = (2 + t.gated) * expert_width(t) * t.expert_ffn
    # Where nothing spreads experts, the tensor axes split their features.
    expert = features / np.where(t.expert * t.expert_tensor > 1, t.expert_tensor, ranks)
    shared = wide * t.shared_ffn / ranks + t.hidden * (t.experts + 2 * t.expert_hidden / ranks)
    return _Held(
        mixes + feeds * wide * t.ffn / ranks,
        mixes + routed * shared,
        routed * expert * t.experts / np.maximum(t.expert, 1.0),
        expert,
        t.vocabulary * t.hidden / ranks,
        adapters(t) / ranks,
    )


def _counted(t: Table, stage: Stage, held: _Held, per_token: SavedActivations) -> dict[str, Array]:
    """Bytes of a rank of a stage."""
    ranks = t.tensor_x * t.tensor_y
    tokens = t.micro * t.sequence / t.context
    handed_on = element_bytes(t) * t.hidden / np.where(split_outside(t), ranks, 1.0)
    each = stage.dense * per_token.dense + stage.routed * per_token.routed + handed_on
    each = each + _modules(t, stage) * (
        np.where(t.experts > 0, per_token.routed, per_token.dense) + 4 * handed_on
    )
    kinds = _state(t, stage, held)
    for kind in ("parameters", "gradients"):
        kinds[kind] = kinds[kind] * (1 - t.weights_on_host)
    at_once = stage.waiting * np.where(in_pairs(t), 2.0, 1.0)
    kinds["activations"] = at_once * tokens * each * (1 - t.activations_on_host)
    if np.any(stage.put_off > 0):
        kinds["activations"] = kinds["activations"] + stage.put_off * _put_off(t, stage, held, tokens)
    kinds["activations"] = kinds["activations"] + _heads(t, stage, held)
    columns = t.vocabulary / ranks
    logits = stage.head * (1 + t.prediction_modules) * _positions(t, tokens, columns) * columns
    logits = logits * t.logit_bytes * element_bytes(t) / 2
    has_layers = stage.dense + stage.routed > 0
    working = np.where(has_layers, tokens * (_working(t, ranks) + per_token.again), 0.0)
    # While the loss is at work its weight is whole, and a layer's are not.
    whole = stage.head * t.narrow_copies * element_bytes(t) * held.table
    whole = whole * (2 * (1 - t.frozen) + (t.zero >= 3) * (t.shard * t.context > 1))
    at_head = np.where(t.narrow_copies > 0, logits + whole > working + kinds["gathered"], logits > working)
    kinds["logits"] = np.where(at_head, logits, 0.0)
    kinds["working"] = np.where(at_head, 0.0, working)
    kinds["gathered"] = np.where(at_head & (t.narrow_copies > 0), whole, kinds["gathered"])
    return kinds


def _put_off(t: Table, stage: Stage, held: _Held, tokens: Array) -> Array:
    """Bytes of a micro-batch of a stage behind its gradients of inputs and before those of weights."""
    dense, routed = put_off_activations(t)
    inner = tokens * (stage.dense * dense + stage.routed * routed)
    layers = np.maximum(stage.dense + stage.routed, 1.0)
    share = t.shard * t.context
    # A part of the model's first layer is the last of its backward pass.
    others = np.maximum(layers - t.virtual, 0.0) / layers
    made = stage.dense * held.dense + stage.routed * (held.besides + held.experts)
    reduced = t.gradient_bytes * (1 + 1 / share) * made
    return np.where((t.zero >= 3) & (share > 1), others * reduced + (1 - others) * inner, inner)


def _heads(t: Table, stage: Stage, held: _Held) -> Array:
    """Bytes of the head's gradients of micro-batches that wait, beside the one at work."""
    several = (t.schedule == _GPIPE) | (t.schedule == _ZB_H1)
    count = np.where(several & (t.pipeline > 1), stage.waiting + stage.put_off, 0.0)
    count = np.where((t.ordered > 0) & (t.logit_chunk > 0), np.maximum(count - 1, 0.0), 0.0)
    return stage.head * (1 - t.frozen) * count * t.gradient_bytes * held.table


def _state(t: Table, stage: Stage, held: _Held) -> dict[str, Array]:
    """Parameters, gradients and optimizer state, and what exists whole while a layer is at work."""
    tables = stage.embedding + stage.head - stage.embedding * stage.head * t.tied
    modules = _modules(t, stage)
    dense = stage.dense + np.where(t.experts > 0, 0.0, modules)
    with_experts = stage.routed + np.where(t.experts > 0, modules, 0.0)
    projections = modules * 2 * t.hidden * t.hidden / (t.tensor_x * t.tensor_y)
    # A module on another stage than the embedding has a copy of it.
    copies = np.where(modules > 0, 1 - stage.embedding, 0.0)
    plain = dense * held.dense + with_experts * held.besides + (tables + copies) * held.table + projections
    spread = with_experts * held.experts
    share = t.shard * t.context
    ranks = t.tensor_x * t.tensor_y
    holding = t.expert * t.expert_tensor
    apart = np.where(holding > 1, np.maximum(share * ranks / holding, 1.0), share)

    def split(level: int) -> Array:
        """Elements on a rank where ZeRO splits them from this level on."""
        return np.where(t.zero >= level, plain / share + spread / apart, plain + spread)

    summed_apart = (t.fused < 1) & (t.zero < 2) & (t.gradient_bytes > t.weight_bytes)
    gradient = t.gradient_bytes + np.where(summed_apart, t.weight_bytes, 0.0)
    layer = np.where(stage.routed > 0, held.besides + held.experts, held.dense)
    # Experts have one shape, so that one gradient serves them all.
    shapes = np.where(stage.routed > 0, held.besides + held.expert, held.dense)
    size = np.minimum(t.weight_bytes, element_bytes(t))
    gathered = np.where((t.fused >= 1) & (t.zero < 2), size * shapes, 0.0)
    gathered = np.where(t.zero == 2, t.gradient_bytes * layer, gathered)
    gathered = np.where(t.zero >= 3, 3 * size * layer, gathered)
    # A stage's task makes all of its gradients before it adds them up.
    own = (t.ordered > 0) & (t.pipeline > 1) & (t.zero < 3)
    gathered = np.where(own, gathered + element_bytes(t) * (plain + spread), gathered)
    whole = np.where((t.zero >= 2) & (share <= 1), 0.0, gathered)
    # Copies in fewer bits are of linear layers; where weights are split for good, of the layer at work.
    copied = copy_bytes(t) * (dense * held.dense + with_experts * (held.besides + held.experts))
    whole = whole + np.where(t.zero >= 3, copy_bytes(t) * layer, 0.0)
    weights = t.weight_bytes * split(3)
    narrow = (t.narrow_copies > 0) & (t.zero >= 1) & (t.zero < 3) & (share > 1)
    weights = np.where(narrow, t.weight_bytes * split(1) + size * split(3), weights)
    kinds = {
        "parameters": weights + np.where(t.zero >= 3, 0.0, copied),
        "gradients": gradient * split(2),
        "optimizer": t.state_bytes * (1 - t.state_on_host) * split(1),
        "gathered": whole,
    }
    return kinds if not np.any(t.frozen > 0) else _frozen(t, stage, held, kinds, split(3), layer)


def _frozen(
    t: Table, stage: Stage, held: _Held, kinds: dict[str, Array], base: Array, layer: Array
) -> dict[str, Array]:
    """State where the model is frozen and adapters are trained; `base`: frozen elements of a rank, `layer`: of one."""
    share = t.shard * t.context
    own = (stage.dense + stage.routed) * held.adapters

    def split(level: int) -> Array:
        return np.where(t.zero >= level, own / share, own)

    # Two layers' weights are gathered, without gradients; adapters' are small beside them.
    size = np.minimum(t.frozen_bytes, element_bytes(t))
    gathered = np.where((t.zero >= 3) & (share > 1), 2 * size * layer, 0.0)
    # Weights of fewer bits are expanded before each product: one layer's at a time.
    expanded = np.where(t.frozen_bytes < element_bytes(t), element_bytes(t) * layer, 0.0)
    found = {
        "parameters": t.frozen_bytes * base + t.weight_bytes * split(3),
        "gradients": t.gradient_bytes * split(2),
        "optimizer": t.state_bytes * (1 - t.state_on_host) * split(1),
        "gathered": gathered + expanded,
    }
    return {kind: np.where(t.frozen > 0, bytes, kinds[kind]) for kind, bytes in found.items()}


def _positions(t: Table, tokens: Array, columns: Array) -> Array:
    """Positions whose logits a rank has at once, each with so many columns."""
    chunk = 2.0 ** np.floor(np.log2(np.maximum(t.logit_chunk / columns, 1.0)))
    return np.where(t.logit_chunk > 0, np.minimum(tokens, chunk), tokens)


def _modules(t: Table, stage: Stage) -> Array:
    """Modules that predict one token more, which lie beside the head."""
    return stage.head * t.prediction_modules


def _working(t: Table, ranks: Array) -> Array:
    """Bytes of a token while a layer goes back."""
    features = np.where(t.experts > 0, t.chosen * t.expert_ffn + t.shared_ffn, t.ffn)
    # One layer at a time: a mixer's columns where they are wider than an MLP's features.
    features = np.maximum(features, np.where(t.mixer_layers > 0, t.mixer_inputs / (2 + t.gated), 0.0))
    rows = np.where(t.experts > 0, t.chosen * expert_width(t), 0.0)
    passed = np.where(t.context > 1, 4 * np.maximum(t.kv_heads / ranks, 1.0) * t.head_dim, 0.0)
    wide: Array = ((2 + t.gated) * features + 2 * rows) / ranks + 2 * t.hidden + passed
    return element_bytes(t) * wide
