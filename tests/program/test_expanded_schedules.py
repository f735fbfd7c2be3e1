"""A schedule's Program, expanded and simulated, has the published bubbles, adds up on every rank, and holds what its
tasks hold."""

from __future__ import annotations

import re

import pytest

from harness.closed_forms import SPAN_BUBBLE, closed_form_bubble, closed_form_peak
from harness.programs import program_of
from harness.stage_tasks import SAVED, Seconds, as_built, norm_and_update, once, simulated, unit_stage
from hyper_parallel.program import GroupOps, TaskKind
from hyper_parallel.report.html import gantt, idle_stretches, task_spans
from hyper_parallel.runtime.build_program import caps_of_1f1b
from hyper_parallel.schedule import (
    Costs,
    Schedule,
    ScheduleName,
    auto_schedule,
    named_schedule,
    with_steady_pairs,
)
from hyper_parallel.trace import Timeline, is_compute

LEFT = 40
Ends = tuple[float, float, float]
"""Seconds of gathers, reductions and the update of a group."""


def _step(
    schedule: Schedule,
    seconds: list[Seconds] | None = None,
    transfer: float = 0.0,
    ends: list[Ends] | None = None,
    left: int = SAVED,
    hidden: float = 0.0,
) -> Timeline:
    program = as_built(program_of(schedule))
    stages = {
        stage: unit_stage(program, stage, (seconds or [(1, 1, 1)] * schedule.stages)[stage], left)
        for stage in range(schedule.stages)
    }
    groups = {
        f"g{rank}": GroupOps(
            before=(once("gather", gather),),
            after=(once("reduce", reduce), norm_and_update(range(schedule.ranks), 0, update)),
        )
        for rank, (gather, reduce, update) in enumerate(ends or [])
    }

    def hides(ahead: int, back: int, kind: TaskKind) -> float:
        return hidden

    return simulated(program, stages, groups, latency=transfer, hides=hides if hidden else None)


def test_1f1b_with_split_backward_passes_on_16_ranks_takes_222_units() -> None:
    timeline = _step(named_schedule("1f1b-split", 16, 64))
    assert timeline.step == 222.0
    assert all(one.total == 222 - 3 * 64 for one in timeline.bubbles_by_class.values())


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 16), (16, 64)])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_equal_tasks_have_the_published_bubble(name: ScheduleName, ranks: int, micro_batches: int) -> None:
    schedule = named_schedule(name, ranks, micro_batches)
    timeline = _step(schedule)
    work = 3.0 * micro_batches * schedule.stages / ranks
    spans = [task_spans(timeline, group) for group in timeline.trace.ops]
    longest = max(tasks[-1].end - tasks[0].start for tasks in spans)
    step = longest if name in SPAN_BUBBLE else timeline.step
    published = closed_form_bubble(name, ranks, 1.0, 1.0, 1.0)
    if name is ScheduleName.DUAL_PIPE_V:
        # Its pairs run one after the other here.
        assert step - work <= published
    elif any(action.kind is TaskKind.BACKWARD for order in schedule.orders for action in order):
        # The papers send a gradient at the end of a whole backward pass. Here it leaves before those of weights.
        early = closed_form_bubble(name, ranks, 1.0, 1.0, 0.0)
        # With several stages on a rank, a send may wait until the other rank has room for what comes.
        late = published if name is ScheduleName.INTERLEAVED else early
        assert early <= step - work <= late
    else:
        assert step - work == published
    peak = max(timeline.peak_of(group).bytes for group in timeline.trace.ops)
    assert peak == SAVED * closed_form_peak(name, ranks, micro_batches)


def _uneven(stages: int) -> list[Seconds]:
    return [(1.0 + 0.3 * (at % 3), 1.2, 0.7 + 0.1 * at) for at in range(stages)]


def test_a_pair_is_one_task_that_is_drawn_as_two_and_holds_what_both_hold() -> None:
    schedule = with_steady_pairs(named_schedule("1f1b", 2, 8, paired=True))
    timeline = _step(schedule, transfer=0.25, hidden=0.5)
    names = [op.name for op in timeline.trace.ops["g0"]]
    # The first stage sends nothing back, so that its gradients of weights are part of the pair.
    assert "F0.3 with B0.0" in names and not {"F0.3", "I0.0", "W0.0"} & {*names}
    assert {"F1.1 with I1.0", "W1.0"} <= {op.name for op in timeline.trace.ops["g1"]}
    pair = next(span for span in timeline.of("g0") if span.op.name == "F0.3 with B0.0")
    assert pair.end - pair.start == 2.5
    for rank in range(2):
        computing = sum(
            span.end - span.start for span in timeline.of(f"g{rank}") if is_compute(span.op.queue)
        )
        assert computing == 24 - 0.5 * len(schedule.pairs_of(rank))
    drawn = gantt(timeline)
    assert "forward of micro-batch 3 in stage 0" in drawn and "together with B0.0" in drawn
    assert "backward of micro-batch 0 in stage 0" in drawn and "together with F0.3" in drawn
    # Both together need what each needs alone: 4 micro-batches of rank 0, which F0.3 makes.
    assert timeline.peak_of("g0").bytes == 4 * SAVED


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h2", "zb-v"])
def test_every_ranks_time_adds_up_to_the_step(name: str) -> None:
    schedule = named_schedule(name, 4, 8)
    ends = [(0.5 + rank, 0.25, 1.0 + rank) for rank in range(4)]
    timeline = _step(schedule, _uneven(schedule.stages), 0.4, ends)
    for group in timeline.trace.ops:
        spans = timeline.of(group)
        busy = sum(span.end - span.start for span in spans if span.op.queue == "compute")
        found = timeline.bubbles_by_class[group]
        assert busy + found.total == pytest.approx(timeline.step)
        assert found.runtime == pytest.approx(0.0)
        assert found.communication > 0
        idle = idle_stretches(timeline, group)
        assert all(one.end > one.start for one in idle)
        tasks = sum(span.end - span.start for span in task_spans(timeline, group))
        update = sum(span.end - span.start for span in spans if span.op.phase == "optimizer")
        gather = sum(span.end - span.start for span in spans if span.op.phase == "gather")
        # What is neither a task nor idle is before the first task or after the last one.
        assert gather + tasks + update + sum(one.end - one.start for one in idle) == pytest.approx(
            max(span.end for span in spans)
        )


def test_what_runs_once_a_step_is_before_and_after_the_tasks() -> None:
    plain = _step(named_schedule("1f1b", 4, 8))
    timeline = _step(named_schedule("1f1b", 4, 8), ends=[(2.0, 0.5, 3.0)] * 4)
    assert timeline.step == pytest.approx(2.0 + plain.step + 0.5 + 3.0)
    # A gather that ends before the first activation comes costs nothing.
    late = [(0.0, 0.0, 0.0), *[(1.0, 0.0, 0.0)] * 3]
    assert _step(named_schedule("1f1b", 4, 8), ends=late).step == plain.step


def test_a_transfer_between_tasks_is_a_span_and_a_bubble_of_its_own() -> None:
    timeline = _step(named_schedule("gpipe", 2, 1), transfer=0.5)
    # The gradient leaves before the last stage's gradients of weights.
    assert timeline.step == 2 + 0.5 + 1 + 0.5 + 2
    received = [
        span for span in timeline.of("g1") if span.op.collective and span.op.collective.kind == "recv"
    ]
    assert [(span.start, span.end) for span in received] == [(1.0, 1.5)]
    assert [(one.cause, one.start, one.end) for one in idle_stretches(timeline, "g1")] == [
        ("fill", 0.0, 1.0),
        ("transfer", 1.0, 1.5),
        ("drain", 4.5, 6.0),
    ]
    causes = {one.cause: one.end - one.start for one in idle_stretches(timeline, "g0")}
    assert causes == {"waiting": 2.5, "transfer": 0.5}


def test_memory_is_what_the_order_of_tasks_holds() -> None:
    schedule = named_schedule("zb-h1", 4, 8)
    timeline = _step(schedule, left=LEFT)
    for rank, order in enumerate(schedule.orders):
        held = most = 0
        for action in order:
            letter = str(action)[0]
            held += {"F": SAVED, "I": 0, "W": 0}[letter]
            most = max(most, held)
            held -= {"F": 0, "I": SAVED - LEFT, "W": LEFT}[letter]
        assert timeline.peak_of(f"g{rank}").bytes == most
        assert held == 0
    curve = timeline.memory("g0")
    assert curve.total[-1] == 0


def test_auto_holds_no_more_than_the_fullest_rank_of_1f1b() -> None:
    costs = Costs.even(4)
    caps = caps_of_1f1b(costs, 4, 16)
    assert caps == (4.0,) * 4
    timeline = _step(auto_schedule(costs, 4, 16, caps).schedule)
    assert all(timeline.peak_of(group).bytes <= 4 * SAVED for group in timeline.trace.ops)
    assert timeline.step <= _step(named_schedule("1f1b-split", 4, 16)).step


def test_the_chart_has_a_row_for_each_group_and_its_tasks_with_numbers() -> None:
    timeline = _step(named_schedule("1f1b-split", 4, 8), transfer=0.5)
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
        timeline = _step(named_schedule("1f1b-split", 2, micro_batches))
        drawn = gantt(timeline)
        task = r'<rect class="task-[fiw]"[^>]* width="([0-9.]+)"[^>]*><title>[^<]*micro-batch (\d+) '
        widths = re.findall(task, drawn)
        assert len(widths) == 2 * 3 * micro_batches
        wide = [number for width, number in widths if float(width) >= 5 + 6 * len(number)]
        assert re.findall(r"<text x=[^>]*>(\d+)</text>", drawn) == wide
