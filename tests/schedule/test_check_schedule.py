"""Schedules of a user's own that are not complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import Action, check_schedule, named_schedule

SCHEDULE = named_schedule("1f1b-split", 2, 2)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (SCHEDULE.orders[0][:-1], "stage 0 runs forward, input of micro-batch 1"),
        ((*SCHEDULE.orders[0], SCHEDULE.orders[0][0]), "forward, forward, input, weight of micro-batch 0"),
        ((*SCHEDULE.orders[0], Action(TaskKind.BACKWARD, 0, 1)), "backward, forward, input, weight"),
        ((*SCHEDULE.orders[0], Action(TaskKind.UPDATE, 0, 1)), "forward, input, update, weight"),
        ((*SCHEDULE.orders[0], Action(TaskKind.FORWARD, 1, 0)), r"rank 0 runs F1\.0"),
        ((*SCHEDULE.orders[0], Action(TaskKind.FORWARD, 0, 2)), r"rank 0 runs F0\.2"),
        ((*SCHEDULE.orders[0], Action(TaskKind.FORWARD, 7, 0)), r"rank 0 runs F7\.0"),
        ((), "stage 0 runs nothing of micro-batch 0"),
    ],
)
def test_refused(order: tuple[Action, ...], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        check_schedule(replace(SCHEDULE, orders=(order, SCHEDULE.orders[1])))


def test_whole_and_split_backward_passes_may_be_mixed() -> None:
    check_schedule(named_schedule("dualpipev", 2, 4))
