"""Strategy: how a model is parallelized and computed. Pure data, one small file for each section, no torch.

A key whose engine does not exist yet is refused by name.
"""

from hyper_parallel.strategy.axes import AXIS_NAMES, EXPERT_SPANS, Axes
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.strategy.overlap import Overlap
from hyper_parallel.strategy.pipeline import Pipeline
from hyper_parallel.strategy.placement import LEVELS, Devices, Placement
from hyper_parallel.strategy.precision import Precision
from hyper_parallel.strategy.recompute import recomputed_layers, recomputes
from hyper_parallel.strategy.schedule_name import ScheduleName
from hyper_parallel.strategy.strategy import Strategy

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
