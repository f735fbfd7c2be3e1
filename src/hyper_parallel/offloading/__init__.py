"""HyperOffload: a step's live bytes under a budget, by moving storages between memories while it runs."""

from hyper_parallel.offloading.runtime.executor import Runtime
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.insert_transfers import apply
from hyper_parallel.offloading.schedule.problem import OffloadTier, Problem, Rate
from hyper_parallel.offloading.schedule.solve import choose
from hyper_parallel.offloading.schedule.transfers import Move, Plan, replay

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
