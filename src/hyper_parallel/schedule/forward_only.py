"""Forward passes alone: evaluation. Each rank runs all micro-batches of one of its stages before those of the next."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule


def forward_only(placement: Sequence[int], micro_batches: int) -> Schedule:
    """Forward passes of stages that lie on these ranks; each micro-batch is ended by a backward pass that computes
    nothing."""
    mine: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        mine[rank].append(stage)
    orders = tuple(
        tuple(
            [Action(TaskKind.FORWARD, stage, m) for stage in stages for m in range(micro_batches)]
            + [
                Action(TaskKind.BACKWARD, stage, m)
                for stage in reversed(stages)
                for m in range(micro_batches)
            ]
        )
        for stages in mine
    )
    return Schedule("forward-only", tuple(placement), orders, micro_batches)
