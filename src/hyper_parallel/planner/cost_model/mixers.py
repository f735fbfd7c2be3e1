"""Token mixers beside attention on one rank: Mamba, delta rules, linear attention, short convolutions.

    products   [T, h] · [h, i / P],  [T, n / P] · [n / P, h]  and those of other matrices        `projected`
    scan       max(FLOPs / (peak16 · FUSED · SCANNED), bytes / (hbm · memory))                   `scanned`
    reference  FLOPs / (peak16 · REFERENCE) + bytes / (hbm · memory)

with i columns in, n rows out and P ranks of the tensor axes, over which heads are split. FLOPs and bytes are those of
`workload.mixers`; the bytes are those of the reference code where a framework has no kernels that fuse the scan
(`scans` is 0), which then takes the sum of both, since its products and its elementwise operators follow each other.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.kernels import Products, moved
from hyper_parallel.planner.table import Array, Table

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
