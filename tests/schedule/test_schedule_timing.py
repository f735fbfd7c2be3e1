"""Times, bubbles and memory of a schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_times import reference_ends, seconds_of
from schedule_cases import uneven

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import (
    Action,
    Costs,
    DeadlockError,
    Schedule,
    ScheduleName,
    named_schedule,
    time_schedule,
)

F, B, I, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT  # noqa: E741


@given(name=st.sampled_from(ScheduleName), ranks=st.integers(1, 4), data=st.data())
def test_times_are_those_of_the_reference(name: ScheduleName, ranks: int, data: st.DataObject) -> None:
    schedule = named_schedule(name, ranks, 2 * ranks)
    costs = data.draw(uneven(schedule.stages))
    timing = time_schedule(schedule, costs)
    ends = reference_ends(schedule, costs)
    for order, starts, stops in zip(schedule.orders, timing.starts, timing.ends, strict=True):
        for action, start, end in zip(order, starts, stops, strict=True):
            assert end == ends[action]
            assert end - start == seconds_of(action, costs)
    assert timing.makespan == max(ends.values())
    for order, bubble in zip(schedule.orders, timing.bubbles, strict=True):
        busy = sum(seconds_of(action, costs) for action in order)
        assert bubble.total == pytest.approx(timing.makespan - busy)
        assert min(bubble.fill, bubble.waiting, bubble.drain) >= 0


def one_rank_each(*orders: tuple[Action, ...]) -> Schedule:
    return Schedule("own", tuple(range(len(orders))), orders, 2)


def test_bubble_by_cause() -> None:
    timing = time_schedule(named_schedule("1f1b", 3, 3), Costs.even(3))
    assert (timing.bubbles[0].fill, timing.bubbles[0].waiting, timing.bubbles[0].drain) == (0, 6, 0)
    assert (timing.bubbles[2].fill, timing.bubbles[2].waiting, timing.bubbles[2].drain) == (2, 0, 4)


def test_deadlock_is_named_with_the_actions_that_wait() -> None:
    schedule = one_rank_each((Action(F, 0, 0), Action(B, 0, 1)), (Action(B, 1, 0), Action(F, 1, 0)))
    with pytest.raises(DeadlockError, match=r"rank 0 at B0\.1; rank 1 at B1\.0"):
        time_schedule(schedule, Costs.even(2))


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(StrategyError, match="has 4 stages, and costs are given for 3"):
        time_schedule(named_schedule("1f1b", 4, 4), Costs.even(3))


def test_transfers_delay_the_next_stage_and_not_the_sender() -> None:
    costs = Costs.even(2, transfer=0.5)
    timing = time_schedule(named_schedule("gpipe", 2, 2), costs)
    assert timing.starts[0][:2] == (0.0, 1.0)
    assert timing.starts[1][:2] == (1.5, 2.5)


def test_transfers_over_one_border_follow_one_another() -> None:
    timing = time_schedule(named_schedule("gpipe", 2, 3), Costs.even(2, transfer=3.0))
    assert timing.starts[1][:3] == (4.0, 7.0, 10.0)


def test_a_border_within_a_rank_costs_nothing() -> None:
    costs = Costs.even(4, transfer=100.0)
    timing = time_schedule(Schedule("own", (0, 0, 0, 0), (one_micro_batch(4),), 1), costs)
    assert timing.makespan == 12.0


def one_micro_batch(stages: int) -> tuple[Action, ...]:
    forward = [Action(F, s, 0) for s in range(stages)]
    return (*forward, *(Action(B, s, 0) for s in reversed(range(stages))))


def test_splitting_frees_nothing_unless_costs_say_so() -> None:
    halves = [Action(kind, 0, m) for m in range(2) for kind in (F, I)]
    order = (*halves, Action(W, 0, 0), Action(W, 0, 1))
    schedule = Schedule("own", (0,), (order,), 2)
    costs = replace(Costs.even(1), saved=(10.0,))
    assert time_schedule(schedule, costs).peaks == (20.0,)
    assert time_schedule(schedule, replace(costs, released=(4.0,))).peaks == (16.0,)
    # What recomputation brings back lives until the weight half.
    assert time_schedule(schedule, replace(costs, released=(-5.0,))).peaks == (30.0,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward": (1.0, -1.0)}, r"forward\[1\] is -1"),
        ({"weight": (1.0, math.nan)}, r"weight\[1\] is nan"),
        ({"transfers": (1.0, 1.0)}, "transfers has 2 values, and 2 stages need 1"),
        ({"saved": (1.0,)}, "saved has 1 values"),
        ({"released": (2.0, 0.0)}, "more than the 1.0 bytes"),
        ({"forward": ()}, "at least one"),
    ],
)
def test_bad_costs_are_refused(change: dict[str, tuple[float, ...]], says: str) -> None:
    given = {
        "forward": (1.0,) * 2,
        "backward": (2.0,) * 2,
        "input": (1.0,) * 2,
        "weight": (1.0,) * 2,
    } | change
    with pytest.raises(StrategyError, match=says):
        Costs(**given)  # type: ignore[arg-type]
