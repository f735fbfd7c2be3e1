"""Pipeline schedules: pure functions from stages and micro-batches to the order of each rank's actions. No torch.

Named schedules (`named_schedule`), their times and memory (`time_schedule`), and schedules made for given costs and
memory (`auto_schedule`) with a bound that says how far they can be from the best (`makespan_bound`). Steps whose
micro-batches are unlike have orders of their own (`step_schedule`). `program.to_program` makes a schedule a
Program.
"""

from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.schedule.auto import AutoSchedule, auto_schedule
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.declared_pipeline import (
    check_pipeline,
    named_schedule,
    stages_of,
    stages_per_rank,
)
from hyper_parallel.schedule.forward_backward_pairs import pairs_of_stages, with_pairs, with_steady_pairs
from hyper_parallel.schedule.lower_bound import makespan_bound
from hyper_parallel.schedule.micro_batch_kinds import MicroBatchKind, forward_only
from hyper_parallel.schedule.step_order import StepSchedule, step_schedule
from hyper_parallel.schedule.timing import Bubble, DeadlockError, Timing, time_schedule
from hyper_parallel.strategy.pipeline import ScheduleName

__all__ = [
    "Action",
    "AutoSchedule",
    "Bubble",
    "Costs",
    "DeadlockError",
    "MicroBatchKind",
    "Schedule",
    "ScheduleName",
    "StepSchedule",
    "Timing",
    "auto_schedule",
    "check_pipeline",
    "forward_only",
    "makespan_bound",
    "named_schedule",
    "pairs_of_stages",
    "stages_of",
    "stages_per_rank",
    "step_schedule",
    "time_schedule",
    "with_pairs",
    "with_steady_pairs",
]
