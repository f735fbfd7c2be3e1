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

import numpy as np

from hyper_parallel.planner.codes import SCHEDULES
from hyper_parallel.planner.table import Array, Table

_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}


def micro_batches(t: Table) -> Array:
    """Micro-batches of a step, on each rank; at least one."""
    return np.maximum(np.round(t.batch / (t.replicate * t.shard * t.micro)), 1.0)


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
