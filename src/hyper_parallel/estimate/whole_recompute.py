"""Recomputation of whole layers: seconds of what this project's graphs leave out when they compute a layer again.

A graph computes again only what the backward pass needs (`graph.recompute`): not a layer's last product, and not the
collective behind it. A checkpoint that calls the layer's function again runs all of it, as Megatron's
`CheckpointFunction` and PyTorch's checkpoint with reentry do. The difference, for each layer that is computed again:

    Σ seconds of its products, attention and collectives in the forward pass − Σ of those that are computed again

Operators bound by memory are left out: few are not computed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Op

_LAYER = re.compile(r"^(.*?\.\d+)(?=\.|$)")
_KINDS = ("matmul", "attention")


def left_out_seconds(ops: Iterable[Op], costs: Costs) -> float:
    """Seconds of a class's ops, of which some may be computed again."""
    once: dict[str, float] = {}
    again: dict[str, float] = {}
    for op in ops:
        layer = _LAYER.match(op.module)
        if layer is None or not (op.recomputed or op.phase == "forward"):
            continue
        if op.collective is None and (op.work is None or op.work.kind not in _KINDS):
            continue
        seconds = costs.collective_seconds(op.collective) if op.collective else costs.seconds(op)
        into = again if op.recomputed else once
        into[layer[1]] = into.get(layer[1], 0.0) + seconds
    return sum(max(0.0, once.get(layer, 0.0) - seconds) for layer, seconds in again.items())
