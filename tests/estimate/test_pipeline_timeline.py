"""A pipeline's Timeline has the published bubbles, adds up on every rank, and holds what its tasks hold."""

from __future__ import annotations

import re

import pytest

from harness.closed_forms import SPAN_BUBBLE, closed_form_bubble, closed_form_peak, longest_span
from hyper_parallel.estimate.pipeline_timeline import Ends, PipelineStep, pipeline_step
from hyper_parallel.estimate.stage_price import StagePrice
from hyper_parallel.estimate.step_figures import Resident
from hyper_parallel.layout import DeviceGroup, Mesh
from hyper_parallel.report.html import gantt, idle_stretches
from hyper_parallel.runtime.build_program import caps_of_1f1b
from hyper_parallel.runtime.stage_costs import StageMemory
from hyper_parallel.schedule import (
    Costs,
    Schedule,
    ScheduleName,
    auto_schedule,
    named_schedule,
    with_steady_pairs,
)
from hyper_parallel.trace import Timeline, is_compute

SAVED, LEFT = 100, 40


def _price(forward: float = 1.0, input: float = 1.0, weight: float = 1.0, left: int = SAVED) -> StagePrice:
    memory = StageMemory(SAVED, left, (SAVED, SAVED, max(left, 1)))
    return StagePrice(forward, input, weight, 0.0, {}, 0.0, 0.0, 0.0, memory, Resident(0, 0, 0), 0)


def _step(
    schedule: Schedule,
    prices: list[StagePrice] | None = None,
    transfer: float = 0.0,
    ends: list[Ends] | None = None,
    norm: float = 0.0,
    hidden: float = 0.0,
) -> tuple[PipelineStep, Timeline]:
    prices = prices or [_price()] * schedule.stages
    costs = Costs(
        forward=tuple(one.forward for one in prices),
        backward=tuple(one.input + one.weight for one in prices),
        input=tuple(one.input for one in prices),
        weight=tuple(one.weight for one in prices),
        transfers=(transfer,) * (schedule.stages - 1),
        hidden=((hidden,) * schedule.stages,) * schedule.stages,
    )
    groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"rank {at}") for at in range(schedule.ranks)]
    made = pipeline_step(
        schedule, groups, prices, costs, ends or [Ends()] * schedule.ranks, [0] * schedule.ranks, norm=norm
    )
    return made, Timeline(made.trace, made.spans, predicted=True, device="unit")


def test_1f1b_with_split_backward_passes_on_16_ranks_takes_222_units() -> None:
    made, timeline = _step(named_schedule("1f1b-split", 16, 64))
    assert timeline.step == made.timing.makespan == 222.0
    assert all(one.total == 222 - 3 * 64 for one in timeline.bubbles_by_class.values())


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 16), (16, 64)])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_equal_tasks_have_the_published_bubble(name: ScheduleName, ranks: int, micro_batches: int) -> None:
    schedule = named_schedule(name, ranks, micro_batches)
    made, timeline = _step(schedule)
    work = 3.0 * micro_batches * schedule.stages / ranks
    step = longest_span(made.timing) if name in SPAN_BUBBLE else timeline.step
    bubble = closed_form_bubble(name, ranks, 1.0, 1.0, 1.0)
    if name is ScheduleName.DUAL_PIPE_V:
        # Its pairs run one after the other here.
        assert step - work <= bubble
    else:
        assert step - work == bubble
    peak = max(timeline.peak_of(group).bytes for group in made.trace.ops)
    assert peak == SAVED * closed_form_peak(name, ranks, micro_batches)


def _uneven(stages: int) -> list[StagePrice]:
    return [_price(1.0 + 0.3 * (at % 3), 1.2, 0.7 + 0.1 * at, LEFT) for at in range(stages)]


def test_a_pair_is_one_task_that_is_drawn_as_two_and_holds_what_both_hold() -> None:
    schedule = with_steady_pairs(named_schedule("1f1b", 2, 8, paired=True))
    made, timeline = _step(schedule, transfer=0.25, hidden=0.5)
    made.trace.check()
    names = [op.name for op in made.trace.ops["rank 0"]]
    assert "F0.3 with B0.0" in names and "F0.3" not in names and "B0.0" not in names
    assert {"receive for B0.0", "send for F1.3"} <= {*names, *(op.name for op in made.trace.ops["rank 1"])}
    pair = next(span for span in timeline.of("rank 0") if span.op.name == "F0.3 with B0.0")
    assert pair.end - pair.start == 2.5
    for rank in range(2):
        computing = sum(
            span.end - span.start for span in timeline.of(f"rank {rank}") if is_compute(span.op.queue)
        )
        assert computing == 24 - 0.5 * len(schedule.pairs_of(rank))
    drawn = gantt(timeline)
    assert "forward of micro-batch 3 in stage 0" in drawn and "together with B0.0" in drawn
    assert "backward of micro-batch 0 in stage 0" in drawn and "together with F0.3" in drawn
    # Both together need what each needs alone: 4 micro-batches of rank 0, which F0.3 makes.
    assert timeline.peak_of("rank 0").bytes == 4 * SAVED


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h2", "zb-v"])
def test_every_ranks_time_adds_up_to_the_step(name: str) -> None:
    schedule = named_schedule(name, 4, 8)
    ends = [Ends(0.5 + rank, 0.25, 1.0 + rank) for rank in range(4)]
    made, timeline = _step(schedule, _uneven(schedule.stages), 0.4, ends, norm=0.1)
    made.trace.check()
    for group in made.trace.ops:
        spans = timeline.of(group)
        busy = sum(span.end - span.start for span in spans if span.op.queue == "compute")
        found = timeline.bubbles_by_class[group]
        assert busy + found.total == pytest.approx(timeline.step)
        assert found.runtime == pytest.approx(0.0)
        assert found.communication > 0
        idle = idle_stretches(timeline, group)
        assert all(one.end > one.start for one in idle)
        tasks = sum(span.end - span.start for span in spans if span.op.module)
        once = sum(span.end - span.start for span in spans if span.op.phase in ("gather", "optimizer"))
        # What is neither a task nor idle is before the first task or after the last one.
        assert tasks + once + sum(one.end - one.start for one in idle) == pytest.approx(
            max(span.end for span in spans)
        )


def test_what_runs_once_a_step_is_before_and_after_the_tasks() -> None:
    plain, _ = _step(named_schedule("1f1b", 4, 8))
    ends = [Ends(gather=2.0, reduce=0.5, update=3.0)] * 4
    _, timeline = _step(named_schedule("1f1b", 4, 8), ends=ends, norm=0.25)
    assert timeline.step == pytest.approx(2.0 + plain.timing.makespan + 0.5 + 0.25 + 3.0)
    # A gather that ends before the first activation comes costs nothing.
    late = [Ends(), *[Ends(gather=1.0)] * 3]
    _, hidden = _step(named_schedule("1f1b", 4, 8), ends=late)
    assert hidden.step == plain.timing.makespan


def test_a_transfer_between_tasks_is_a_span_and_a_bubble_of_its_own() -> None:
    made, timeline = _step(named_schedule("gpipe", 2, 1), transfer=0.5)
    assert timeline.step == 3 + 3 + 2 * 0.5
    received = [
        span for span in timeline.of("rank 1") if span.op.collective and span.op.collective.kind == "recv"
    ]
    assert [(span.start, span.end) for span in received] == [(1.0, 1.5)]
    assert [(one.cause, one.start, one.end) for one in idle_stretches(timeline, "rank 1")] == [
        ("fill", 0.0, 1.0),
        ("transfer", 1.0, 1.5),
        ("drain", 4.5, 7.0),
    ]
    assert [one.cause for one in idle_stretches(timeline, "rank 0")] == ["waiting", "transfer"]
    assert made.timing.bubbles[0].waiting == 4.0


def test_memory_is_what_the_order_of_tasks_holds() -> None:
    schedule = named_schedule("zb-h1", 4, 8)
    prices = [_price(left=LEFT)] * 4
    _, timeline = _step(schedule, prices)
    for rank, order in enumerate(schedule.orders):
        held = most = 0
        for action in order:
            letter = str(action)[0]
            held += {"F": SAVED, "I": 0, "W": 0}[letter]
            most = max(most, held)
            held -= {"F": 0, "I": SAVED - LEFT, "W": LEFT}[letter]
        assert timeline.peak_of(f"rank {rank}").bytes == most
        assert held == 0
    curve = timeline.memory("rank 0")
    assert curve.total[-1] == 0


def test_auto_holds_no_more_than_the_fullest_rank_of_1f1b() -> None:
    costs = Costs.even(4)
    caps = caps_of_1f1b(costs, 4, 16)
    assert caps == (4.0,) * 4
    made, timeline = _step(auto_schedule(costs, 4, 16, caps).schedule)
    assert all(timeline.peak_of(group).bytes <= 4 * SAVED for group in made.trace.ops)
    assert timeline.step <= _step(named_schedule("1f1b-split", 4, 16))[1].step


def test_the_chart_has_a_row_for_each_group_and_its_tasks_with_numbers() -> None:
    _, timeline = _step(named_schedule("1f1b-split", 4, 8), transfer=0.5)
    drawn = gantt(timeline)
    assert drawn.count('class="name"') == 4
    for kind, count in (("task-f", 32), ("task-i", 32), ("task-w", 32)):
        assert drawn.count(f'<rect class="{kind}"') == count
    assert drawn.count('<rect class="idle-fill"') == 3
    assert drawn.count('<rect class="idle-drain"') == 3
    assert "<title>input gradients of micro-batch 7 in stage 0: " in drawn
    assert "predicted" in drawn


def test_a_task_has_its_number_where_it_is_wide_enough() -> None:
    for micro_batches in (4, 200):
        _, timeline = _step(named_schedule("1f1b-split", 2, micro_batches))
        drawn = gantt(timeline)
        task = r'<rect class="task-[fiw]"[^>]* width="([0-9.]+)"[^>]*><title>[^<]*micro-batch (\d+) '
        widths = re.findall(task, drawn)
        assert len(widths) == 2 * 3 * micro_batches
        wide = [number for width, number in widths if float(width) >= 5 + 6 * len(number)]
        assert re.findall(r"<text x=[^>]*>(\d+)</text>", drawn) == wide
