"""Bytes of the fullest rank, by kind, and whether they fit.

**State.** A parameter takes `weight_bytes`, its gradient `gradient_bytes`, its optimizer state `state_bytes`: 2 + 4 +
12 for AdamW in mixed precision with gradients summed in 32 bits, and 2 + 2 + 12 = 16 where they are not (ZeRO, arXiv
1910.02054, section 3.1; Megatron's distributed optimizer has 6 + 12/d). ZeRO 1 splits the state over d = shard ·
context, 2 also the gradients, 3 also the parameters (section 5). Experts are held by fewer ranks and split over what
is left, d · P / expert of them. A framework that does not sum gradients within its products (`fused`) has each in the
weights' format beside the sum; one that does still makes one of each shape (Transformer Engine's `wgrad` dummies), a
layer's. ZeRO 3 has two layers gathered, the one at work and the next, and one layer's whole gradient.       `_state`

**Activations.** `activations.kept` for each token and layer, times the micro-batches that wait for their backward
pass. Stage i of p has, of m micro-batches (`_waiting`):

    1F1B, ZB-H1   min(m, p - i)                                             arXiv 2104.04473, section 2.2; 2401.10241
    interleaved   min(m, (2 (p - i - 1) + (v - 1) p + 1) / v)               2104.04473, section 2.3: L (1 + (p-1)/(pv))
    GPipe         m                                                         1811.06965                layers on stage 0
    ZB-V          min(m, p)                                                 2405.15362
    DualPipe      min(m, p + 1), and each rank holds two stages             2412.19437, table 2

**Head.** The last stage holds logits: bf16, their float32 copy, and a gradient of each, the float32 one in place of
the copy where the loss is fused: 8 bytes, else 12, of T · V / P elements (`_logits`).                2205.05198, 4.3

**Work.** While a layer goes back, its widest gradients exist, and with sequence parallelism a gathered hidden state
and its gradient (`_working`). They are not there while logits are: the larger counts. Embedding, head and layers are
on different stages, so the first, the second and the last stage are counted and the fullest is taken (`memory`).

**Fits.** What the allocator reserves exceeds what is allocated, and the driver's and the collectives' own buffers lie
outside of it: peak · slack + outside ≤ capacity (`fits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hyper_parallel.plan.model.activations import element_bytes, kept, product_bytes
from hyper_parallel.plan.table import PRECISIONS, SCHEDULES, Array, Table

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "working")
"""What the bytes of a rank are for; `gathered` are whole weights and gradients of the layers at work."""


@dataclass(frozen=True)
class MemoryConstants:
    """What is not counted but fitted, or known of devices and allocators."""

    slack: float = field(
        default=1.05,
        metadata={"unit": "ratio", "meaning": "bytes that the allocator reserves to those allocated"},
    )
    outside: float = field(
        default=2.5e9, metadata={"unit": "B", "meaning": "the driver's and the collectives' own buffers"}
    )


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline."""

    layers: Array
    """Layers that a rank of it holds."""
    routed: Array
    """Those of them with experts."""
    first: bool
    last: bool
    waiting: Array
    """Micro-batches of it that wait for their backward pass."""


def memory(t: Table) -> dict[str, Array]:
    """Bytes of the fullest rank by kind of KINDS; their sum is its peak of allocated bytes."""
    stages = [_counted(t, stage) for stage in _stages(t)]
    if len(stages) == 1:
        return stages[0]
    peaks = np.stack([np.broadcast_to(_sum(kinds), t.n) for kinds in stages])
    fullest = np.argmax(peaks, axis=0)
    return {
        kind: np.choose(fullest, [np.broadcast_to(stage[kind], t.n) for stage in stages]) for kind in KINDS
    }


def fits(t: Table, peak: Array, k: MemoryConstants) -> Array:
    """Whether a peak of allocated bytes fits the device, and every stage has a layer: truth values."""
    return (peak * k.slack + k.outside <= t.capacity) & placed(t)


def placed(t: Table) -> Array:
    """Whether the stages can all be given something to do.

    Where stages are cut by layers, each part of the pipeline needs one. Where they are cut by cost (`balanced`), each
    block goes to the current stage, and the next stage begins once the blocks' cost exceeds the stage's share; head,
    cast and loss come last and move on by one stage each (nanotron, `PipelineBlock`s of `build_model`). A stage that
    is never reached makes the run fail. So does, there, a step of fewer micro-batches than p - 1.
    """
    parts = t.pipeline * t.virtual
    share = _share(t)
    reached = np.where(share >= 1, np.ceil(t.layers / share) - 1, t.layers)
    by_cost = (reached + 2 >= t.pipeline - 1) & (_micro_batches(t) >= t.pipeline - 1)
    return np.where((t.balanced > 0) & (t.virtual <= 1), by_cost, parts <= t.layers) > 0


def _micro_batches(t: Table) -> Array:
    return np.maximum(1.0, np.round(t.batch / (t.replicate * t.shard * t.micro)))


def _share(t: Table) -> Array:
    """A stage's share of the cost, in layers: the head costs as many as it has times a layer's parameters."""
    layer = np.maximum(_attention_parameters(t) + _dense_parameters(t) + _routed_parameters(t, t.chosen), 1.0)
    return (t.layers + t.vocabulary * t.hidden / layer) / t.pipeline


def _stages(t: Table) -> list[Stage]:
    """The first, the second and the last stage."""
    ranks = np.where(t.schedule == SCHEDULES.index("dualpipe"), np.maximum(t.pipeline / 2, 1.0), t.pipeline)
    share = _share(t)
    even = np.ceil(t.layers / ranks)
    by_cost = t.balanced > 0
    dense = np.where(t.experts > 0, t.dense_layers, t.layers)
    first = np.where(by_cost, np.minimum(np.floor(share) + 1, t.layers), even)
    first = np.where(t.pipeline > 1, first, t.layers)
    routed = np.maximum(first - dense, 0.0)
    only = bool(np.all(t.pipeline == 1))
    beginning = Stage(first, routed, True, only, _waiting(t, np.zeros(1)))
    if only:
        return [beginning]
    one = t.pipeline == 1
    middle = np.where(one, 0.0, np.where(by_cost, np.ceil(share), even))
    held = np.where(t.pipeline > 2, middle, 0.0)
    after = np.minimum(held, np.maximum(t.layers - dense - routed, 0.0))
    second = Stage(held, after, False, False, _waiting(t, np.ones(1)))
    end = np.where(by_cost, np.maximum(np.floor(share - (share * t.pipeline - t.layers)), 0.0), even)
    end = np.where(one, t.layers, end)
    has_experts = np.where(t.experts > 0, 1.0, 0.0)
    last_routed = np.where(one, routed, np.minimum(end, np.maximum(t.layers - dense, 0.0)) * has_experts)
    return [beginning, second, Stage(end, last_routed, False, True, _waiting(t, t.pipeline - 1))]


def _waiting(t: Table, stage: Array) -> Array:
    """Micro-batches of a stage that wait for their backward pass, at most."""
    p, v = t.pipeline, t.virtual
    count = np.where(v > 1, (2 * (p - stage - 1) + (v - 1) * p + 1) / v, p - stage)
    for name, other in (("gpipe", np.inf), ("zb-v", p), ("dualpipe", p + 1)):
        count = np.where(t.schedule == SCHEDULES.index(name), other, count)
    return np.minimum(np.maximum(count, 1.0), _micro_batches(t))


def _counted(t: Table, stage: Stage) -> dict[str, Array]:
    """Bytes of a rank of a stage."""
    ranks = t.tensor_x * t.tensor_y
    tokens = t.micro * t.sequence / t.context
    per_token = kept(t)
    dense_layers = stage.layers - stage.routed
    activations = stage.waiting * (dense_layers * per_token.dense + stage.routed * per_token.routed)
    one = t.pipeline == 1
    head = one | stage.last
    outside = np.where(t.sequence_parallel > 0, 1 / ranks, 1.0)
    # What goes to the next stage, or into the head, is kept as well.
    activations = tokens * (activations + stage.waiting * element_bytes(t) * t.hidden * outside)
    working = tokens * (_working(t, ranks) + per_token.again)
    logits = np.where(head, tokens * t.vocabulary / ranks * _logits(t), 0.0)
    # The embedding's and the head's weights; a tied one is on both ends of a pipeline.
    tables = np.where(one, 2.0 - t.tied, 1.0 if stage.first or stage.last else 0.0)
    kinds = _state(t, stage, ranks, tables * t.vocabulary * t.hidden / ranks)
    kinds["activations"] = activations * (1 - t.activations_on_host)
    kinds["logits"] = np.where(logits > working, logits, 0.0)
    kinds["working"] = np.where(logits > working, 0.0, working)
    return kinds


def _state(t: Table, stage: Stage, ranks: Array, tables: Array) -> dict[str, Array]:
    """Parameters, gradients and optimizer state, and what of them is gathered."""
    attention = _attention_parameters(t) + 2 * t.hidden * ranks
    dense_layer = (attention + _dense_parameters(t)) / ranks
    # Experts that are not spread are split over the tensor axes, as attention is.
    held = np.where(t.expert > 1, t.experts / np.maximum(t.expert, 1.0), t.experts / ranks)
    besides = (attention + _shared_parameters(t)) / ranks + t.hidden * t.experts
    experts = held * _expert_parameters(t)
    plain = (stage.layers - stage.routed) * dense_layer + stage.routed * besides + tables
    spread = stage.routed * experts
    share = t.shard * t.context
    share_experts = np.where(t.expert > 1, np.maximum(share * ranks / np.maximum(t.expert, 1.0), 1.0), share)

    def of(bytes_each: Array, level: int) -> Array:
        split = t.zero >= level
        return bytes_each * (
            plain / np.where(split, share, 1.0) + spread / np.where(split, share_experts, 1.0)
        )

    beside = np.where(
        (t.fused > 0) | (t.zero >= 2) | (t.gradient_bytes <= t.weight_bytes), 0.0, t.weight_bytes
    )
    layer = np.where(stage.routed > 0, besides + experts, dense_layer)
    moving = np.minimum(t.weight_bytes, element_bytes(t))
    gathered = np.where((t.zero >= 3) & (share > 1), (2 * moving + moving) * layer, 0.0)
    gathered = gathered + np.where((t.zero == 2) & (share > 1), t.gradient_bytes * layer, 0.0)
    # Experts have one shape, so that one gradient serves them all.
    shapes = np.where(stage.routed > 0, besides + _expert_parameters(t), dense_layer)
    gathered = gathered + np.where((t.fused > 0) & (t.zero < 2), moving * shapes, 0.0)
    return {
        "parameters": of(t.weight_bytes + _narrow_copies(t), 3),
        "gradients": of(t.gradient_bytes + beside, 2),
        "optimizer": of(t.state_bytes * (1 - t.state_on_host), 1),
        "gathered": gathered,
    }


def _narrow_copies(t: Table) -> Array:
    """Bytes of a parameter's copies in 8 bits or fewer, one for each direction of the product: kept over a step."""
    return np.where(t.precision >= PRECISIONS.index("fp8"), 2 * product_bytes(t), 0.0)


def _logits(t: Table) -> Array:
    """Bytes of a logit."""
    return 2 * element_bytes(t) + np.where(t.fused > 0, 4.0, 8.0)


def _working(t: Table, ranks: Array) -> Array:
    """Bytes of a token while a layer goes back."""
    size = element_bytes(t)
    features = np.where(t.experts > 0, t.chosen * t.expert_ffn + t.shared_ffn, t.ffn)
    rows = np.where(t.experts > 0, t.chosen * t.hidden, 0.0) / ranks
    return size * ((2 + t.gated) * features / ranks + 2 * t.hidden + 2 * rows)


def _attention_parameters(t: Table) -> Array:
    """Of a layer; as `workload.Shape.attention`."""
    plain = t.hidden * t.head_dim * 2 * (t.heads + t.kv_heads)
    if not np.any(t.key_rank > 0):
        return plain
    whole = t.plain + t.rotary
    queries = np.where(
        t.query_rank > 0, t.query_rank * (t.hidden + t.heads * whole), t.hidden * t.heads * whole
    )
    keys = t.hidden * (t.key_rank + t.rotary) + t.key_rank * t.heads * (t.plain + t.value)
    return np.where(t.key_rank > 0, queries + keys + t.heads * t.value * t.hidden, plain)


def _dense_parameters(t: Table) -> Array:
    """Of an MLP without experts."""
    return (2 + t.gated) * t.hidden * t.ffn


def _expert_parameters(t: Table) -> Array:
    return (2 + t.gated) * t.hidden * t.expert_ffn


def _shared_parameters(t: Table) -> Array:
    return (2 + t.gated) * t.hidden * t.shared_ffn


def _routed_parameters(t: Table, experts: Array) -> Array:
    """Of so many experts and of the shared ones."""
    return np.where(t.experts > 0, experts * _expert_parameters(t) + _shared_parameters(t), 0.0)


def _sum(kinds: Mapping[str, Array]) -> Array:
    total: Array = np.zeros(1)
    for kind in KINDS:
        total = total + kinds[kind]
    return total
