"""HyperOffload: a step's live bytes under a budget, by moving storages between memories while it runs."""

from hyper_parallel.offloading.runtime import Runtime
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import apply
from hyper_parallel.offloading.schedule.problem import Move, OffloadTier, Plan, Problem, Rate, replay
from hyper_parallel.offloading.schedule.solve import choose

__all__ = [
    "Move",
    "OffloadTier",
    "Plan",
    "Problem",
    "Rate",
    "Runtime",
    "apply",
    "build_problem",
    "choose",
    "replay",
]
