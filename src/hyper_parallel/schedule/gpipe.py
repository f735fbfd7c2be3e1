"""GPipe: all forward passes, then all backward passes.

Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, arXiv 1811.06965,
section 2.3. Backward passes run in the order of the micro-batches, so that gradients are summed in that order.
"""

from __future__ import annotations

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank; all micro-batches are in flight at once. Raises StrategyError for bad sizes."""
    at_least("gpipe", ranks, micro_batches)
    orders = tuple(
        tuple(
            Action(kind, rank, m)
            for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
            for m in range(micro_batches)
        )
        for rank in range(ranks)
    )
    return Schedule("gpipe", tuple(range(ranks)), orders, micro_batches)
