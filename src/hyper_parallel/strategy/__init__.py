"""Strategy: how a model is parallelized and computed. Pure data, one small file for each section, no torch.

A key whose engine does not exist yet is refused by name.
"""

from hyper_parallel.strategy.axes import AXIS_NAMES, EXPERT_SPANS, LEVELS, Axes, Devices, Placement
from hyper_parallel.strategy.memory import Memory, recomputed_layers, recomputes
from hyper_parallel.strategy.pipeline import Pipeline, ScheduleName
from hyper_parallel.strategy.strategy import Overlap, Precision, Strategy

__all__ = [
    "AXIS_NAMES",
    "EXPERT_SPANS",
    "LEVELS",
    "Axes",
    "Devices",
    "Memory",
    "Overlap",
    "Pipeline",
    "Placement",
    "Precision",
    "ScheduleName",
    "Strategy",
    "recomputed_layers",
    "recomputes",
]
