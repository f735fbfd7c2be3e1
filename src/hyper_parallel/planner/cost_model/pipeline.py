"""Pipeline time: the pace of the slowest stage, and the bubble.

A stage of ℓ layers takes F + B a micro-batch. With m micro-batches, p stages and v parts a rank the bubble is

| schedule | bubble | source |
|---|---|---|
| gpipe, 1f1b | (p − 1) (F + B) | GPipe, arXiv 1811.06965, section 2.3; PipeDream-Flush, 2104.04473, section 2.2.1 |
| interleaved | (p − 1) (F + B) / v | arXiv 2104.04473, section 2.2.2 |
| zb-h1 | (p − 1) (F + B − 2 W) | zero bubble, arXiv 2401.10241, section 2.3 |
| zb-v | (p − 1) (F + B − 2 W) / 2 | controllable memory, arXiv 2405.15362, section 3: V-Half's, two parts a rank |
| dualpipe | (p / 2 − 1) (F + B − 3 W) | DeepSeek-V3, arXiv 2412.19437, table 2 |

with W the products of the weights' gradients, which no other stage waits for, here half of the backward's products;
none is below 0. (`bubble`)

**Uneven stages.** The slowest stage sets the pace. Layers seldom divide evenly, and the last stage has the head. Where
a framework cuts stages by cost (`balanced`), the head counts as head / layer layers, and the pace is that of the share
(L + head / layer) / p, rounded up where its fraction exceeds a quarter. Where blocks go to a stage until its share is
exceeded (`greedy`), the slowest stage has ⌊share⌋ + 1 layers (nanotron's `build_model`). Otherwise the pace is that of
max(⌈L / p⌉ layers, the last stage's layers and the head). (`pace`)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.columns import SCHEDULES
from hyper_parallel.planner.cost_model.dims import mixing_parameters
from hyper_parallel.planner.table import Array, Table

_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}


def micro_batches(t: Table) -> Array:
    """Micro-batches of a step, on each rank; at least one."""
    return np.maximum(np.round(t.batch / (t.replicate * t.shard * t.micro)), 1.0)


def in_pairs(t: Table) -> npt.NDArray[np.bool_]:
    """Where two micro-batches run side by side, each beside the collectives of the other: without a pipeline, with an
    even number of them, and where layers have collectives of tensor axes or of experts."""
    sends = (t.tensor_x * t.tensor_y > 1) | (t.expert * t.expert_tensor > 1)
    pairs = (t.ordered > 0) & (t.paired > 0) & sends & (t.pipeline <= 1) & (micro_batches(t) % 2 == 0)
    return np.asarray(pairs, dtype=np.bool_)


def pace(t: Table, layer: Array, head: Array) -> Array:
    """Seconds of the slowest stage for one micro-batch, from those of a layer and of the head."""
    p, v = t.pipeline, t.virtual
    even = t.layers / p
    # Parts of a rank in an interleaved schedule even out: a rank's layers are what counts, to within one part.
    whole = np.where(v > 1, even, np.ceil(even))
    # What does not divide goes to the first stages.
    last = np.where(v > 1, even, np.floor(even))
    cut = np.maximum(whole * layer, last * layer + head / np.where(v > 1, np.minimum(v, 2.0), 1.0))
    share = (t.layers + head / layer) / p
    best = np.maximum(np.ceil(share - 0.25), share)
    fine = np.where(v > 1, share, np.where(t.greedy > 0, np.floor(share) + 1, best))
    return np.where(p > 1, np.where(t.balanced > 0, fine * layer, cut), t.layers * layer + head)


def bubble(t: Table, stage: Array, weights: Array) -> Array:
    """Seconds that a rank waits in a step. `stage`: a micro-batch on a stage; `weights`: W of it."""
    p = t.pipeline
    schedule = t.schedule
    plain = (p - 1) * stage
    waits = np.where(t.virtual > 1, plain / t.virtual, plain)
    if np.any(schedule >= _CODE["zb-h1"]):
        waits = np.where(schedule == _CODE["zb-h1"], (p - 1) * (stage - 2 * weights), waits)
        waits = np.where(schedule == _CODE["zb-v"], (p - 1) * (stage - 2 * weights) / 2, waits)
        waits = np.where(schedule == _CODE["dualpipe"], (p / 2 - 1) * (stage - 3 * weights), waits)
    return np.where(p > 1, np.maximum(waits, 0.0), 0.0)


# Pipeline stages: layers, in-flight micro-batches, embedding and head.
#
# **In flight.** Stage i of p holds the activations of at most this number of the m micro-batches (`waiting`):
#
#     1F1B, ZB-H1   min(m, p - i)                                 arXiv 2104.04473, section 2.2; 2401.10241, section 2.3
#     interleaved   min(m, (2 (p - i - 1) + (v - 1) p + 1) / v)   2104.04473, section 2.3; on stage 0 that is
#                                                                 L (1 + (p - 1) / (p v)) layers: 2205.05198, section 5
#     GPipe         m                                             1811.06965, section 2.3
#     ZB-V          min(m, p)                                     2405.15362, section 3
#     DualPipe      min(m, p + 1) of one of the two stages that each rank holds        2412.19437, table 2
#
# **Put off** (`put_off`, `_drained`; of what `train` runs). Zero-bubble schedules compute gradients of weights later
# than those of inputs; until then a micro-batch holds what that needs (`memory._put_off`). Stage i holds, as
# `hyper_parallel.schedule` orders them, in micro-batches that wait for their backward pass and for their weights,
#
#     ZB-H1   (p - i, i) in a forward pass, (p - i - 1, i + 1) behind a backward pass
#     ZB-V    (p, 0), and in the drain ((p - i - 1) / 2, (2 i + 1) / 2), where all that is left is put off
#
# **Cut.** Stages have ⌈L / p⌉ layers. Cut by cost (`balanced`) they have a share of (L + head) / p, the head being
# worth as many layers as it has times a layer's parameters, and at most ⌈share⌉ layers. Cut greedily (`greedy`,
# nanotron's `build_model`) a stage takes blocks until they cost more than its share, so that the first has ⌊share⌋ + 1
# layers. In ZB-V and DualPipe the rank with the first stage also has the last.
#
# **Work for all** (`placed`). Each part of the pipeline needs a layer. A greedy cut can leave a stage empty although
# there are enough layers: each block moves on by one stage at most, and after the layers only the head and the cast of
# its logits do. Such a run fails, and so does one of fewer micro-batches than p - 1 (nanotron's 1F1B engine).

_ZB_H1, _ZB_V, _DUALPIPE, _GPIPE = (SCHEDULES.index(name) for name in ("zb-h1", "zb-v", "dualpipe", "gpipe"))


@dataclass(frozen=True)
class Stage:
    """A rank of one stage."""

    dense: Array
    """Layers without experts that it holds."""
    routed: Array
    """Layers with experts."""
    waiting: Array
    """Micro-batches whose activations it holds, at most."""
    put_off: Array
    """Micro-batches whose gradients of weights are put off meanwhile."""
    embedding: Array
    """1: it has the embedding."""
    head: Array
    """1: it has the head."""


def stages(t: Table) -> list[Stage]:
    """The first, the second and the last stage: embedding, most layers and head are on one of them. Where gradients of
    weights are put off, the last two also when they put off most."""
    one = t.pipeline == 1
    zero, ones = np.zeros(1), np.ones(1)
    plain = np.where(t.experts > 0, t.dense_layers, t.layers)
    meet = (t.schedule == _ZB_V) | (t.schedule == _DUALPIPE)
    ranks = np.where(t.schedule == _DUALPIPE, np.maximum(t.pipeline / 2, 1.0), t.pipeline)
    by_cost, share = t.balanced > 0, share_of_cost(t)
    even = np.ceil(t.layers / ranks)
    fair = np.where(t.greedy > 0, np.floor(share) + 1, np.ceil(share))
    first = np.where(by_cost, np.minimum(fair, t.layers), even)
    waits = waiting(t, zero)
    if np.any((t.ordered > 0) & ~one):
        head_of_v, tail_of_v = _first_by_cost(t, share)
        first = np.where(t.ordered > 0, head_of_v + tail_of_v, first)
        # Of what waits on the first rank of a V all but one micro-batch are in the first part.
        uneven = ((2 * waits - 1) * head_of_v + tail_of_v) / first
        waits = np.where((t.ordered > 0) & (t.schedule == _ZB_V) & ~one, uneven, waits)
    first = np.where(one, t.layers, first)
    beginning = Stage(
        np.minimum(first, plain),
        np.maximum(first - plain, 0.0),
        waits,
        put_off(t, zero),
        ones,
        np.where(one | meet, 1.0, 0.0),
    )
    if bool(np.all(one)):
        return [beginning]
    # Dense layers come first in models that have both kinds.
    before = np.maximum(plain - first, 0.0)
    others = np.where(by_cost, np.ceil(share), even)
    # Parts of a V with a layer more are those that come late, which the last rank has not.
    turn = (t.ordered > 0) & (t.schedule == _ZB_V)
    rest = (t.layers - first) / np.maximum(t.pipeline - 1, 1.0)
    middle = np.where(t.pipeline > 2, np.where(turn, np.ceil(rest), others), 0.0)
    plain_middle, routed_middle = np.minimum(middle, before), np.maximum(middle - before, 0.0)
    second = Stage(plain_middle, routed_middle, waiting(t, ones), put_off(t, ones), zero, zero)
    # Modules that predict one token more stand in the place of as many layers.
    at_end = _head_in_layers(t)
    left = np.maximum(even - t.prediction_modules, 0.0)
    at_end = at_end + t.prediction_modules * (1 + at_end)
    end = np.where(by_cost, np.maximum(np.floor(share - at_end), 0.0), left)
    end = np.where(turn, np.floor(rest), end)
    end = np.where(one, 0.0, end)
    routed = np.minimum(end, np.maximum(t.layers - plain, 0.0))
    at = t.pipeline - 1
    head = np.where(one | meet, 0.0, 1.0)
    found = [
        beginning,
        second,
        Stage(end - routed, routed, waiting(t, at), put_off(t, at), zero, head),
    ]
    late = (t.ordered > 0) & ~one & ((t.schedule == _ZB_H1) | (t.schedule == _ZB_V))
    if np.any(late):
        found.append(Stage(end - routed, routed, *_drained(t, at, late), zero, head))
        routed = np.minimum(middle, np.maximum(t.layers - plain, 0.0))
        before_last = np.maximum(at - 1, 0.0)
        found.append(Stage(middle - routed, routed, *_drained(t, before_last, late), zero, zero))
    return found


def _first_by_cost(t: Table, share: Array) -> tuple[Array, Array]:
    """Layers of the first stage where all others have as many as the slowest (`graph.stage_cut`): of cuts that are
    equally fast it has the fewest bytes, and the first stage holds most micro-batches. In ZB-V the model is cut into
    twice as many parts, and the rank of the first has the last, too: its layers come second."""
    parts = np.where(t.schedule == _ZB_V, 2.0, 1.0)
    most = np.maximum(np.ceil(share / parts - 0.25), 1.0)
    last = np.maximum(np.floor(most - _head_in_layers(t)), 0.0)
    first = np.clip(t.layers - most * (t.pipeline * parts - 2) - last, 1.0, most)
    return first, np.where(parts > 1, last, 0.0)


def put_off(t: Table, stage: Array) -> Array:
    """Micro-batches of a stage whose gradients of weights are put off while most wait for their backward pass."""
    behind = (t.ordered > 0) & (t.pipeline > 1) & (t.schedule == _ZB_H1)
    return np.where(behind, np.minimum(stage, micro_batches(t)), 0.0)


def _drained(t: Table, stage: Array, late: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Micro-batches of a stage that wait, and those that are put off, when most are put off."""
    parts = np.where(t.schedule == _ZB_V, 2.0, 1.0)
    count = np.minimum(np.where(t.schedule == _ZB_V, stage + 0.5, stage + 1), micro_batches(t))
    left = np.minimum((t.pipeline - stage - 1) / parts, micro_batches(t))
    return np.where(late, left, waiting(t, stage)), np.where(late, count, 0.0)


def waiting(t: Table, stage: Array) -> Array:
    """Micro-batches of a stage that wait for their backward pass, at most."""
    p, v = t.pipeline, t.virtual
    count = np.where(v > 1, (2 * (p - stage - 1) + (v - 1) * p + 1) / v, p - stage)
    count = np.where(t.schedule == _ZB_V, p, count)
    m = micro_batches(t)
    count = np.minimum(np.where(t.schedule == _GPIPE, m, np.maximum(count, 1.0)), m)
    # Layers are those of two stages, and a micro-batch is in one of them.
    return np.where(t.schedule == _DUALPIPE, np.minimum(p + 1, 2 * m) / 2, count)


def placed(t: Table) -> npt.NDArray[np.bool_]:
    """Whether every stage has work."""
    share = share_of_cost(t)
    reached = np.where(share >= 1, np.ceil(t.layers / share) - 1, t.layers)
    by_blocks = (reached + 2 >= t.pipeline - 1) & (micro_batches(t) >= t.pipeline - 1)
    by_layers = t.pipeline * t.virtual <= t.layers
    return np.asarray(np.where(t.greedy > 0, by_blocks, by_layers), dtype=np.bool_)


def share_of_cost(t: Table) -> Array:
    """A stage's share of the model, in layers, the head included."""
    return (t.layers + _head_in_layers(t)) / t.pipeline


def _head_in_layers(t: Table) -> Array:
    mlp = np.where(t.experts > 0, t.chosen * t.expert_ffn + t.shared_ffn, t.ffn)
    layer = mixing_parameters(t) + t.mlp_layers / t.layers * (2 + t.gated) * t.hidden * mlp
    return t.vocabulary * t.hidden / np.maximum(layer, 1.0)
