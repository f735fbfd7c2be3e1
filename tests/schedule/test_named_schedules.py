"""Named schedules: completeness, data dependencies, names, and sizes that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import assert_complete

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import Costs, ScheduleName, named_schedule, time_schedule
from hyper_parallel.schedule.declared_pipeline import SPLITS_BACKWARD


@given(
    name=st.sampled_from(ScheduleName),
    ranks=st.integers(1, 9),
    rounds=st.integers(2, 4),
    more=st.integers(0, 3),
    times=st.tuples(*[st.floats(0.1, 10.0)] * 4),
)
def test_each_action_once_and_no_deadlock(
    name: ScheduleName, ranks: int, rounds: int, more: int, times: tuple[float, float, float, float]
) -> None:
    more = 0 if name is ScheduleName.INTERLEAVED else more
    schedule = named_schedule(name, ranks, rounds * ranks + more)
    assert_complete(schedule)
    timing = time_schedule(schedule, Costs.even(schedule.stages, *times))
    assert len(timing.peaks) == ranks
    splits = any(action.kind is TaskKind.WEIGHT for action in schedule.orders[0])
    assert splits == (name in SPLITS_BACKWARD)


@given(ranks=st.integers(1, 8), micro_batches=st.integers(1, 20), parts=st.integers(2, 4))
def test_sizes_that_are_not_refused_give_whole_schedules(ranks: int, micro_batches: int, parts: int) -> None:
    for name in ScheduleName:
        try:
            schedule = named_schedule(
                name, ranks, micro_batches, parts if name is ScheduleName.INTERLEAVED else None
            )
        except StrategyError:
            continue
        assert_complete(schedule)
        time_schedule(schedule, Costs.even(schedule.stages))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1F1B", ScheduleName.ONE_F_ONE_B),
        ("Schedule1F1B", ScheduleName.ONE_F_ONE_B),
        ("ScheduleGPipe", ScheduleName.GPIPE),
        ("Interleaved1F1B", ScheduleName.INTERLEAVED),
        ("ScheduleInterleaved1F1B", ScheduleName.INTERLEAVED),
        ("interleaved", ScheduleName.INTERLEAVED),
        ("ScheduleZBVZeroBubble", ScheduleName.ZB_V),
        ("ScheduleDualPipeV", ScheduleName.DUAL_PIPE_V),
        ("DualPipe_V", ScheduleName.DUAL_PIPE_V),
        ("zb_h1", ScheduleName.ZB_H1),
        ("ZBH2", ScheduleName.ZB_H2),
        ("V-Half", ScheduleName.V_HALF),
        ("vmin", ScheduleName.V_MIN),
    ],
)
def test_spellings(text: str, name: ScheduleName) -> None:
    assert ScheduleName.parse(text) is name


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "parts", "says"),
    [
        ("1f1c", 4, 8, None, "did you mean '1f1b'"),
        ("gpipe", 0, 8, None, "at least 1"),
        ("1f1b", 4, 0, None, "at least 1"),
        ("zb-h1", 4, 3, None, "at least 4"),
        ("zb-h2", 4, 6, None, "at least 7"),
        ("zb-v", 4, 6, None, "at least 7"),
        ("dualpipev", 4, 7, None, "at least 8"),
        ("interleaved", 4, 10, None, "take 12 micro-batches"),
        ("interleaved", 4, 8, 1, "choose 1f1b"),
        ("1f1b", 4, 8, 2, "choose interleaved-1f1b"),
        ("zb-v", 4, 8, 3, "cut the model into 8 stages"),
    ],
)
def test_refused(name: str, ranks: int, micro_batches: int, parts: int | None, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        named_schedule(name, ranks, micro_batches, parts)


def test_weight_gradients_run_in_the_order_of_micro_batches() -> None:
    """So that they are summed in the order in which one device sums them."""
    for name in ScheduleName:
        for order in named_schedule(name, 4, 12).orders:
            for stage in {action.stage for action in order}:
                for kind in TaskKind:
                    run = [a.micro_batch for a in order if a.stage == stage and a.kind is kind]
                    assert run == sorted(run)
