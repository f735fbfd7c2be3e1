"""Forward passes alone: evaluation. Each rank runs all micro-batches of one of its stages before those of the next.

Each micro-batch is ended by a backward pass that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.micro_batch_kinds import MicroBatchKind, StepTables
from hyper_parallel.schedule.schedule import Action, Schedule

_NAME = "forward-only"


def forward_only(placement: Sequence[int], micro_batches: int) -> Schedule:
    """Of stages that lie on these ranks."""
    mine: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        mine[rank].append(stage)
    orders = [_order([(stage, m) for stage in stages for m in range(micro_batches)]) for stages in mine]
    return Schedule(_NAME, tuple(placement), tuple(orders), micro_batches)


def forward_only_kinds(kinds: Sequence[MicroBatchKind], ranks: int) -> Schedule:
    """Of micro-batches of several kinds, numbered with their stages as `step_schedule` does, kind by kind."""
    tables = StepTables(kinds, ranks)
    orders = [
        _order(
            [(tables.first_stage[tables.kind_of[m]] + stage, m) for m, stage in enumerate(own) if stage >= 0]
        )
        for own in tables.stage
    ]
    return Schedule(_NAME, tables.placement, tuple(orders), tables.micro_batches)


def _order(passes: Sequence[tuple[int, int]]) -> tuple[Action, ...]:
    """Of (stage, micro-batch), on one rank."""
    place = {stage: at for at, stage in enumerate(dict.fromkeys(stage for stage, _ in passes))}
    ends = sorted(passes, key=lambda one: (-place[one[0]], one[1]))
    return (
        *(Action(TaskKind.FORWARD, stage, m) for stage, m in passes),
        *(Action(TaskKind.BACKWARD, stage, m) for stage, m in ends),
    )
