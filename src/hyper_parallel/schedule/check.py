"""Completeness of a schedule: each pass of each micro-batch once, on the rank of its stage."""

from __future__ import annotations

from collections import defaultdict

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Schedule

_COMPLETE = (
    [TaskKind.BACKWARD, TaskKind.FORWARD],
    [TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT],
)
"""What a stage runs for one micro-batch, sorted: the backward pass whole or in halves."""


def check_schedule(schedule: Schedule) -> None:
    """Raise StrategyError for an action that is missing, doubled, unknown or on another rank than its stage.

    Whether the orders deadlock is for `time_schedule` to say.
    """
    found: dict[tuple[int, int], list[TaskKind]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            in_range = (
                0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches
            )
            if not in_range or schedule.placement[action.stage] != rank:
                raise StrategyError(
                    f"schedule {schedule.name}: rank {rank} runs {action}, which is no action of its stages and the "
                    f"{schedule.micro_batches} micro-batches; put it on the rank of its stage, or leave it out"
                )
            found[action.stage, action.micro_batch].append(action.kind)
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            kinds = sorted(found[stage, m])
            if kinds not in _COMPLETE:
                raise StrategyError(
                    f"schedule {schedule.name}: stage {stage} runs {', '.join(kinds) or 'nothing'} of micro-batch {m}; "
                    "it must run forward and backward once each, or forward, input and weight"
                )
