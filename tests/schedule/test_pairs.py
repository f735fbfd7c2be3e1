"""Pairs of a forward and a backward pass: times, closed forms, and no pair that makes a step longer."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.closed_forms import closed_form_bubble
from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.runtime.build_program import caps_of_1f1b, choose_schedule
from hyper_parallel.schedule import (
    Action,
    Costs,
    DeadlockError,
    Schedule,
    ScheduleName,
    check_pipeline,
    named_schedule,
    pairs_of_stages,
    time_schedule,
    with_pairs,
)
from hyper_parallel.strategy import Pipeline, Strategy

F, B = TaskKind.FORWARD, TaskKind.BACKWARD


def _costs(stages: int, hidden: float, transfer: float = 0.0) -> Costs:
    return replace(Costs.even(stages, transfer=transfer), hidden=((hidden,) * stages,) * stages)


def test_a_pair_starts_when_both_inputs_are_there_and_gives_both_results_at_its_end() -> None:
    orders = (
        (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)),
        (Action(F, 1, 0), Action(B, 1, 0), Action(F, 1, 1), Action(B, 1, 1)),
    )
    schedule = Schedule("by hand", (0, 1), orders, 2, pairs=((), (1,)))
    timing = time_schedule(schedule, _costs(2, 0.5))
    # Stage 1: F0 from 1 to 2, B0 with F1 until 2 + 2 + 1 − 0.5, then B1; stage 0 goes on when the pair has ended.
    assert timing.starts[1] == (1.0, 2.0, 4.5, 4.5) and timing.ends[1] == (2.0, 4.5, 4.5, 6.5)
    assert timing.ends[0] == (1.0, 2.0, 6.5, 8.5)
    assert [one.waiting for one in timing.bubbles] == [2.5, 0.0]


def test_a_pair_whose_halves_wait_for_each_other_over_other_ranks_is_a_deadlock() -> None:
    schedule = named_schedule("gpipe", 2, 2)
    at = next(at for at, action in enumerate(schedule.orders[0]) if action.kind is B) - 1
    paired = replace(schedule, pairs=((at,), ()))
    with pytest.raises(DeadlockError):
        time_schedule(paired, _costs(2, 0.5))
    assert not with_pairs(schedule, _costs(2, 0.5)).pairs_of(0)


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 16), (8, 32)])
def test_1f1b_with_more_passes_ahead_pairs_all_of_its_steady_state(ranks: int, count: int) -> None:
    found = with_pairs(named_schedule("1f1b", ranks, count, paired=True), _costs(ranks, 0.5))
    assert [len(found.pairs_of(rank)) for rank in range(ranks)] == [
        count - 2 * (ranks - rank - 1) - 1 for rank in range(ranks)
    ]
    plain = time_schedule(named_schedule("1f1b", ranks, count), _costs(ranks, 0.5))
    # The last rank's pairs, and it fills as before.
    assert time_schedule(found, _costs(ranks, 0.5)).makespan == plain.makespan - 0.5 * (count - 1)


def test_plain_1f1b_has_no_pair_that_makes_neighbours_wait() -> None:
    assert not with_pairs(named_schedule("1f1b", 4, 16), _costs(4, 0.5)).pairs


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dualpipev_in_pairs_has_at_most_its_published_bubble(ranks: int) -> None:
    count, hidden = 4 * ranks, 0.5
    costs = _costs(2 * ranks, hidden)
    found = with_pairs(named_schedule("dualpipev", ranks, count), costs)
    timing = time_schedule(found, costs)
    work = min(6.0 * count - hidden * len(found.pairs_of(rank)) for rank in range(ranks))
    bubble = closed_form_bubble(ScheduleName.DUAL_PIPE_V, ranks, 1.0, 1.0, 1.0, pair=3.0 - hidden)
    assert timing.makespan - work <= bubble
    assert {len(pair) for pair in pairs_of_stages(found)} == {2}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(ScheduleName),
    ranks=st.integers(1, 4),
    times=st.lists(st.floats(0.2, 3.0), min_size=32, max_size=32),
    share=st.floats(0.0, 0.5),
    transfer=st.floats(0.0, 0.3),
)
def test_pairs_never_make_a_step_longer(
    name: ScheduleName, ranks: int, times: list[float], share: float, transfer: float
) -> None:
    schedule = named_schedule(name, ranks, 3 * ranks, paired=True)
    stages = schedule.stages
    forward, input, weight = (tuple(times[at * stages : (at + 1) * stages]) for at in range(3))
    costs = Costs(
        forward=forward,
        backward=tuple(i + w for i, w in zip(input, weight, strict=True)),
        input=input,
        weight=weight,
        transfers=(transfer,) * (stages - 1),
        hidden=tuple(tuple(share * min(f, i) for i in input) for f in forward),
    )
    found = with_pairs(schedule, costs)
    assert found.orders == schedule.orders
    assert time_schedule(found, costs).makespan <= time_schedule(schedule, costs).makespan
    for rank, order in enumerate(found.orders):
        places = sorted(found.pairs_of(rank))
        assert all(later - at > 1 for at, later in itertools.pairwise(places))
        for at in places:
            kinds = {order[at].kind, order[at + 1].kind}
            assert F in kinds and TaskKind.WEIGHT not in kinds and len(kinds) == 2
            assert order[at].micro_batch != order[at + 1].micro_batch
    if not share:
        assert not found.pairs


def test_a_named_schedule_has_its_pairs_whatever_they_hide_and_none_where_nothing_is_sent() -> None:
    asked = Pipeline(schedule="1f1b", overlap_forward_backward=True)
    some = _costs(2, 1e-9)
    assert [len(found) for found in choose_schedule(asked, 2, 8, some).pairs] == [5, 7]
    assert choose_schedule(asked, 2, 8, _costs(2, 0.0)) == named_schedule("1f1b", 2, 8)
    # One micro-batch has no other one.
    assert choose_schedule(asked, 2, 1, some) == named_schedule("1f1b", 2, 1)


def test_an_input_half_hides_its_own_time_at_most() -> None:
    costs = replace(_costs(2, 0.5), input=(0.0, 1.0))
    assert [costs.hides(0, stage, split=True) for stage in (0, 1)] == [0.0, 0.5]
    found = with_pairs(named_schedule("zb-h2", 2, 12), costs)
    assert not found.pairs_of(0) and found.pairs_of(1)


def test_auto_takes_what_is_shortest_with_pairs_and_keeps_the_caps_of_paired_1f1b() -> None:
    costs = _costs(4, 0.8)
    asked = Pipeline(overlap_forward_backward=True)
    found = time_schedule(choose_schedule(asked, 4, 16, costs), costs)
    one = time_schedule(choose_schedule(asked.model_copy(update={"schedule": "1f1b"}), 4, 16, costs), costs)
    plain = time_schedule(choose_schedule(Pipeline(), 4, 16, costs), costs)
    assert found.makespan <= one.makespan and found.makespan < plain.makespan
    caps = caps_of_1f1b(costs, 4, 16, paired=True)
    assert all(held <= cap for held, cap in zip(found.peaks, caps, strict=True))
    assert caps == (8.0,) * 4 and caps_of_1f1b(costs, 4, 16) == (4.0,) * 4


def _declared(schedule: str) -> Strategy:
    return Strategy.model_validate(
        {
            "version": 1,
            "axes": {"pipeline": 2, "tensor": 2},
            "pipeline": {"schedule": schedule, "overlap_forward_backward": True},
        }
    )


@pytest.mark.parametrize("name", [*ScheduleName, "auto"])
def test_schedules_without_pairs_on_every_rank_are_refused_with_those_that_have_them(name: str) -> None:
    if name not in ("gpipe", "zb-h1", "v-half", "v-min"):
        check_pipeline(_declared(name), 8)
        return
    with pytest.raises(StrategyError) as refusal:
        check_pipeline(_declared(name), 8)
    assert str(refusal.value) == (
        f"pipeline.overlap_forward_backward: {name} has no forward pass beside a backward pass of another "
        "micro-batch on every rank; set pipeline.schedule to 1f1b, interleaved-1f1b, dualpipev or auto, or leave "
        "overlap_forward_backward out"
    )
