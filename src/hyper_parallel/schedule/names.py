"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule.dual_pipe_v import dual_pipe_v
from hyper_parallel.schedule.gpipe import gpipe
from hyper_parallel.schedule.interleaved import interleaved
from hyper_parallel.schedule.one_f_one_b import one_f_one_b, one_f_one_b_split
from hyper_parallel.schedule.schedule import Schedule
from hyper_parallel.schedule.v_shaped import v_half, v_min, zb_v
from hyper_parallel.schedule.zero_bubble import zb_h1, zb_h2
from hyper_parallel.strategy.schedule_name import ScheduleName

_ONE_STAGE: dict[ScheduleName, Callable[[int, int], Schedule]] = {
    ScheduleName.GPIPE: gpipe,
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.ONE_F_ONE_B_SPLIT: one_f_one_b_split,
    ScheduleName.ZB_H1: zb_h1,
    ScheduleName.ZB_H2: zb_h2,
}
_TWO_STAGES: dict[ScheduleName, Callable[[int, int], Schedule]] = {
    ScheduleName.ZB_V: zb_v,
    ScheduleName.V_HALF: v_half,
    ScheduleName.V_MIN: v_min,
    ScheduleName.DUAL_PIPE_V: dual_pipe_v,
}
_BEGINS_EARLIER: dict[ScheduleName, Callable[..., Schedule]] = {
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.ONE_F_ONE_B_SPLIT: one_f_one_b_split,
}
"""Schedules with one stage on each rank that begin with more forward passes where these run in pairs."""
SPLITS_BACKWARD = frozenset(ScheduleName) - {
    ScheduleName.GPIPE,
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.INTERLEAVED,
}
"""Schedules that compute input and weight gradients apart: under layer recomputation these hold more in between."""


def stages_per_rank(name: str) -> int:
    """Stages on each rank that a schedule has where nothing else is said. Raises StrategyError for an unknown name."""
    return 1 if ScheduleName.parse(name) in _ONE_STAGE else 2


def named_schedule(
    name: str, ranks: int, micro_batches: int, virtual: int | None = None, *, paired: bool = False
) -> Schedule:
    """The schedule of that name.

    `virtual`: stages on each rank; what the schedule has when left out. `paired`: 1F1B schedules begin with the forward
    passes that pairs need (`schedule.pairs` makes them); the others have these, or have no pairs. Raises StrategyError
    for sizes that the schedule cannot have.
    """
    known = ScheduleName.parse(name)
    if known is ScheduleName.INTERLEAVED:
        return interleaved(ranks, micro_batches, virtual or 2)
    fixed, build = (1, _ONE_STAGE[known]) if known in _ONE_STAGE else (2, _TWO_STAGES[known])
    if virtual not in (None, fixed):
        other = "choose interleaved-1f1b for more" if fixed == 1 else f"cut the model into {2 * ranks} stages"
        raise StrategyError(
            f"schedule {known} has {fixed} stage{'s' * (fixed > 1)} on each rank, and {virtual} were given; "
            f"{other}"
        )
    if paired and known in _BEGINS_EARLIER:
        return _BEGINS_EARLIER[known](ranks, micro_batches, paired=True)
    return build(ranks, micro_batches)
