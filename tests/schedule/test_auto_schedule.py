"""`auto`: complete, within its caps, never longer than a named schedule, never shorter than the bound."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import assert_complete, recomputed, uneven

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import (
    Action,
    Costs,
    Schedule,
    ScheduleName,
    Timing,
    auto_schedule,
    makespan_bound,
    named_schedule,
    time_schedule,
)

NEAR = 1 + 1e-9
EFFORT = 3000
"""Less than users have, so that properties are tested often."""


def fits(timing: Timing, caps: list[float]) -> bool:
    return all(peak <= cap * NEAR for peak, cap in zip(timing.peaks, caps, strict=True))


@settings(max_examples=30)
@given(
    ranks=st.integers(1, 5),
    parts=st.integers(1, 3),
    rounds=st.integers(1, 3),
    more=st.integers(0, 2),
    room=st.sampled_from([0.0, 0.3, 1.0, math.inf]),
    released=st.lists(st.sampled_from([-0.5, 0.0, 0.5]), min_size=1, max_size=3),
    recomputes=st.booleans(),
    data=st.data(),
)
def test_auto(
    ranks: int,
    parts: int,
    rounds: int,
    more: int,
    room: float,
    released: list[float],
    recomputes: bool,
    data: st.DataObject,
) -> None:
    micro_batches = ranks * rounds + more
    costs = data.draw(uneven(ranks * parts))
    costs = replace(costs, released=tuple(released[s % len(released)] for s in range(costs.stages)))
    if recomputes:
        costs = recomputed(costs)
    least = [float(parts) * max(1.0, 1 - min(released))] * ranks
    caps = [cap * (1 + room) + (ranks - rank - 1) * parts for rank, cap in enumerate(least)]
    found = auto_schedule(costs, ranks, micro_batches, caps, effort=EFFORT)
    assert_complete(found.schedule)
    timing = time_schedule(found.schedule, costs)
    assert timing.makespan == pytest.approx(found.makespan)
    assert fits(timing, caps)
    assert found.bound <= timing.makespan * NEAR
    assert makespan_bound(costs, found.schedule.placement, micro_batches, caps) <= timing.makespan * NEAR
    for name, merged in itertools.product(ScheduleName, {1, parts}):
        try:
            named = named_schedule(name, ranks, micro_batches, parts // merged)
        except StrategyError:
            continue
        other = time_schedule(named, costs.merged(merged))
        if fits(other, caps):
            assert timing.makespan <= other.makespan * NEAR, name


@given(name=st.sampled_from(ScheduleName), ranks=st.integers(1, 5), released=st.floats(-1, 1), data=st.data())
def test_no_schedule_is_below_the_bound(
    name: ScheduleName, ranks: int, released: float, data: st.DataObject
) -> None:
    """With caps that are just what the schedule holds, and with transfers longer than passes."""
    schedule = named_schedule(name, ranks, 2 * ranks)
    costs = data.draw(uneven(schedule.stages))
    longer = data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    costs = replace(
        costs,
        transfers=tuple(longer * t for t in costs.transfers),
        released=(released,) * costs.stages,
    )
    timing = time_schedule(schedule, costs)
    bound = makespan_bound(costs, schedule.placement, schedule.micro_batches, timing.peaks)
    assert bound <= timing.makespan * NEAR


def test_the_bound_is_1f1b_s_own_time_under_its_memory() -> None:
    """16 stages, 64 micro-batches, F = I = W = 1, caps P − s: machine loads alone say 207, CP-SAT proves 1F1B."""
    costs = Costs.even(16)
    assert makespan_bound(costs, range(16), 64, [16.0 - s for s in range(16)]) == 222
    assert makespan_bound(costs, range(16), 64) == 207
    assert auto_schedule(costs, 16, 64, [16.0 - s for s in range(16)]).makespan == 222


def legal_orders(micro_batches: int) -> list[tuple[int, ...]]:
    """Orders of one stage's actions as kind numbers, micro-batches in their order."""
    words: list[tuple[int, ...]] = [()]
    for _ in range(3 * micro_batches):
        words = [
            (*word, kind)
            for word in words
            for kind in range(3)
            if word.count(kind) < (word.count(kind - 1) if kind else micro_batches)
        ]
    return words


def best_of_all_orders(costs: Costs, micro_batches: int, caps: list[float]) -> float:
    """Of all orders of one stage on each rank."""
    kinds = (TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT)
    best = math.inf
    for words in itertools.product(legal_orders(micro_batches), repeat=costs.stages):
        orders = tuple(
            tuple(Action(kinds[k], rank, word[:i].count(k)) for i, k in enumerate(word))
            for rank, word in enumerate(words)
        )
        try:
            timing = time_schedule(Schedule("own", tuple(range(costs.stages)), orders, micro_batches), costs)
        except StrategyError:
            continue
        if fits(timing, caps):
            best = min(best, timing.makespan)
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("micro_batches", "caps"),
    [(3, [1.0, 1.0]), (3, [2.0, 1.0]), (3, [3.0, 3.0]), (2, [1.0, 2.0, 1.0]), (2, [2.0, 2.0, 1.0])],
)
def test_optimal_on_the_smallest_instances(seed: int, micro_batches: int, caps: list[float]) -> None:
    draw = random.Random(seed)
    stages = len(caps)

    def times() -> tuple[float, ...]:
        return tuple(float(draw.randint(4, 12)) for _ in range(stages))

    forward, input, weight = times(), times(), times()
    costs = Costs(
        forward=forward,
        backward=tuple(i + w for i, w in zip(input, weight, strict=True)),
        input=input,
        weight=weight,
        transfers=tuple(float(draw.randint(0, 2)) for _ in range(stages - 1)),
    )
    best = best_of_all_orders(costs, micro_batches, caps)
    found = auto_schedule(costs, stages, micro_batches, caps)
    assert found.makespan == best
    assert found.bound <= best


def test_split_backward_passes_are_left_where_recomputation_makes_them_dear() -> None:
    costs = recomputed(Costs.even(4))
    found = auto_schedule(costs, 4, 32, [4.0 - s for s in range(4)])
    kinds = {action.kind for order in found.schedule.orders for action in order}
    assert kinds == {TaskKind.FORWARD, TaskKind.BACKWARD}


def test_one_stage_that_recomputes_is_priced_too() -> None:
    """Three stages split for nothing; the slowest one would run its forward pass twice."""
    costs = Costs.even(4)
    dear = recomputed(costs)
    costs = replace(
        costs,
        backward=(*costs.backward[:3], dear.backward[3]),
        input=(*costs.input[:3], dear.input[3]),
        weight=(*costs.weight[:3], dear.weight[3]),
    )
    caps = [4.0 - s for s in range(4)]
    plain = time_schedule(named_schedule("1f1b", 4, 32), costs)
    found = auto_schedule(costs, 4, 32, caps)
    assert (
        found.makespan <= plain.makespan < time_schedule(named_schedule("1f1b-split", 4, 32), costs).makespan
    )


def test_what_one_stage_s_halves_add_is_not_set_against_what_another_s_free() -> None:
    """Neighbouring stages of one rank run as one, the later one's input gradient first."""
    costs = replace(Costs.even(2), saved=(10.0, 10.0), released=(5.0, -5.0))
    for cap in (20.0, 25.0, 45.0):
        found = auto_schedule(costs, 1, 4, [cap])
        assert fits(time_schedule(found.schedule, costs), [cap])


def test_the_answer_depends_on_the_arguments_alone() -> None:
    costs = replace(Costs.even(6), forward=(1.0, 2.0, 1.5, 1.0, 3.0, 1.0), transfers=(0.2,) * 5)
    first = auto_schedule(costs, 3, 9, [5.0, 5.0, 5.0])
    assert auto_schedule(costs, 3, 9, [5.0, 5.0, 5.0]).schedule == first.schedule


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "caps", "says"),
    [
        (3, 8, None, "4 stages and 8 micro-batches on 3 ranks"),
        (4, 0, None, "at least 1 of each"),
        (4, 8, [1.0], r"the caps \[1.0\] were given for 4 ranks"),
        (4, 8, [1.0, math.nan, 1.0, 1.0], "give each a number"),
        (4, 8, [1.0, 1.0, 0.5, 1.0], "rank 2 may hold 0.5, and one micro-batch of its stages saves 1"),
        (2, 8, [1.9, 2.0], "rank 0 may hold 1.9, and one micro-batch of its stages saves 2"),
    ],
)
def test_refused(ranks: int, micro_batches: int, caps: list[float] | None, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        auto_schedule(Costs.even(4), ranks, micro_batches, caps)
