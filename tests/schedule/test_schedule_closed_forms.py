"""Timing gives the published bubbles and memory exactly."""

from __future__ import annotations

import pytest
from reference_times import B, F, reference_ends

from harness.closed_forms import SPAN_BUBBLE, closed_form_bubble, closed_form_peak, longest_span
from hyper_parallel.schedule import Costs, ScheduleName, named_schedule, time_schedule

ANY = [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 2.0), (3.0, 2.0, 1.0), (1.0, 3.0, 5.0)]
SMALL_WEIGHT = [times for times in ANY if times[2] <= min(times[:2])]
EVEN = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]
HOLDS = {
    ScheduleName.GPIPE: ANY,
    ScheduleName.ONE_F_ONE_B: ANY,
    ScheduleName.ONE_F_ONE_B_SPLIT: ANY,
    ScheduleName.INTERLEAVED: ANY,
    ScheduleName.ZB_H1: SMALL_WEIGHT,
    ScheduleName.ZB_H2: SMALL_WEIGHT,
    ScheduleName.ZB_V: EVEN,
    ScheduleName.V_HALF: EVEN,
    ScheduleName.V_MIN: EVEN,
}
SIZES = [(2, 4), (3, 9), (4, 8), (5, 15), (6, 18), (8, 16), (9, 27), (16, 64)]


@pytest.mark.parametrize("name", HOLDS)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_bubble(name: ScheduleName, ranks: int, micro_batches: int) -> None:
    schedule = named_schedule(name, ranks, micro_batches)
    for forward, input, weight in HOLDS[name]:
        costs = Costs.even(schedule.stages, forward, input, weight)
        timing = time_schedule(schedule, costs)
        busy = schedule.stages // ranks * micro_batches * (forward + input + weight)
        whole = longest_span(timing) if name in SPAN_BUBBLE else timing.makespan
        assert whole - busy == closed_form_bubble(name, ranks, forward, input, weight), (
            forward,
            input,
            weight,
        )


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_peak(name: ScheduleName, ranks: int, micro_batches: int) -> None:
    schedule = named_schedule(name, ranks, micro_batches)
    timing = time_schedule(schedule, Costs.even(schedule.stages))
    assert max(timing.peaks) == closed_form_peak(name, ranks, micro_batches)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_interleaved_bubble_is_that_of_one_stage(stages_per_rank: int) -> None:
    """(P − 1)(F + B) / v of the rank's own F and B, which are v times a stage's."""
    schedule = named_schedule("interleaved", 4, 12, stages_per_rank)
    timing = time_schedule(schedule, Costs.even(schedule.stages, 1.0, 2.0, 1.0))
    assert timing.makespan == 12 * stages_per_rank * 4.0 + 3 * 4.0
    assert max(timing.peaks) == closed_form_peak(ScheduleName.INTERLEAVED, 4, 12, stages_per_rank)


def test_sixteen_stages_and_64_micro_batches() -> None:
    """3 M + 2 (P − 1) of 1F1B with split backward passes, F = I = W = 1."""
    assert time_schedule(named_schedule("1f1b-split", 16, 64), Costs.even(16)).makespan == 222


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES[:5])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 2.0, 2.0), (1.5, 2.0, 1.0)])
def test_dual_pipe_v_with_fused_pairs(
    ranks: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    schedule = named_schedule("dualpipev", ranks, micro_batches)
    costs = Costs.even(2 * ranks, *times)
    ends = reference_ends(schedule, costs, lambda first, second: first.kind is F and second.kind is B)
    bubble = closed_form_bubble(ScheduleName.DUAL_PIPE_V, ranks, *times)
    assert max(ends.values()) - 2 * micro_batches * sum(times) == bubble


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (3.0, 2.0, 1.0)])
def test_dual_pipe_v_one_after_the_other(
    ranks: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    forward, input, weight = times
    timing = time_schedule(named_schedule("dualpipev", ranks, micro_batches), Costs.even(2 * ranks, *times))
    assert timing.makespan - 2 * micro_batches * sum(times) == (ranks - 1) * (forward + input - weight)


@pytest.mark.parametrize("name", [ScheduleName.ZB_H2, ScheduleName.ZB_V])
def test_a_barrier_after_the_step_costs_the_fill(name: ScheduleName) -> None:
    schedule = named_schedule(name, 8, 24)
    timing = time_schedule(schedule, Costs.even(schedule.stages))
    assert timing.makespan - longest_span(timing) == 7
