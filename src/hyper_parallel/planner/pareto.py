"""Pareto front of step time and device memory.

The search is asked again with less and less memory, in equal ratios from the whole device's down to what the smallest
strategy of all needs. What a larger limit already gave is left out, so that the points are a front: none is both slower
and larger than another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer

STEPS = 8
"""Limits that are asked for between the least and the most."""


def front(question: Question, constants: Constants) -> list[Figures]:
    """The strategies of the front, the smallest first; empty where nothing fits."""
    device = question.cluster.device
    assert device is not None, "a table needs a device"
    one = replace(question, top=1)
    least = answer(replace(one, objective="memory"), constants)
    if not least.best:
        return []
    found = [least.best[0]]
    # The smallest strategy fits in this and less: what an allocator loses is a constant's matter.
    lowest = min(1.0, 1.1 * least.best[0].peak / device.memory.bytes)
    for share in np.geomspace(lowest, 1.0, STEPS):
        memory = replace(device.memory, bytes=float(share) * device.memory.bytes)
        limited = replace(one.cluster, device=replace(device, memory=memory))
        found += answer(replace(one, cluster=limited), constants).best
    told = [
        figures(choice.table.replaced(capacity=device.memory.bytes), choice.estimate)[0] for choice in found
    ]
    return _undominated(told)


def _undominated(points: list[Figures]) -> list[Figures]:
    """Those that no other is both quicker and smaller than, the smallest first."""
    kept: list[Figures] = []
    for one in sorted(points, key=lambda one: (one.peak, one.seconds)):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept
