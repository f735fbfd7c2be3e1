"""What must hold of every simulation, on random traces."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.traces import Ops, toy, trace
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Bytes, Timeline, Trace

SLACK = 1e-9
"""Seconds: what sums of floats leave."""

QUEUES = ("compute", "compute", "compute:vector", "comm:shard", "comm:tensor", "copy:device>host", "host")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """One to three classes; collectives join all of them, in one order on each axis."""
    classes = draw(st.integers(1, 3))
    plan = draw(st.lists(st.sampled_from(QUEUES), min_size=1, max_size=25))
    written = []
    for _ in range(classes):
        ops = Ops()
        for place, queue in enumerate(plan):
            after = sorted(draw(st.sets(st.integers(0, place - 1), max_size=3))) if place else []
            size = draw(st.integers(0, 9))
            kept = {"allocates": (Bytes(place, size, "activation"),)}
            freed = draw(st.sampled_from(["now", "never"]))
            if freed == "now":
                kept["frees"] = (place,)  # type: ignore[assignment]
            if queue.startswith("comm"):
                ranks = (0, 1) if classes == 1 else range(classes)
                axis = queue.removeprefix("comm:")
                ops.send(f"{place}", 5, ranks, *after, axis=axis, kind="all_reduce", tag=axis, **kept)
            elif queue.startswith("copy"):
                ops.copy(f"{place}", size, "device>host", *after, **kept)
            else:
                kind = draw(st.sampled_from(["matmul", "elementwise"]))
                ops.kernel(f"{place}", size if queue != "host" else 0, *after, queue=queue, kind=kind, **kept)
        written.append(ops)
    return trace(*written)


def _alone(costs: Costs, op: object) -> float:
    if op.collective:  # type: ignore[attr-defined]
        return sum(leg.latency + leg.seconds for leg in costs.legs(op.collective))  # type: ignore[attr-defined]
    if op.queue.startswith("copy"):  # type: ignore[attr-defined]
        return sum(leg.latency + leg.seconds for leg in costs.copy(op))  # type: ignore[arg-type]
    return costs.seconds(op)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(traces())
def test_every_simulation(drawn: Trace) -> None:
    cluster = toy(slowdown=1.5, latency=0.25)
    timeline = simulate(drawn, cluster)
    _is_no_faster_than_it_can_be(drawn, timeline, Costs(cluster))
    _keeps_its_order_and_runs_nothing_twice_at_once(drawn, timeline)
    _computes_in_every_moment_or_explains_it(timeline)
    _has_the_memory_that_its_ops_keep(drawn, timeline)


def _is_no_faster_than_it_can_be(drawn: Trace, timeline: Timeline, costs: Costs) -> None:
    for name, ops in drawn.ops.items():
        path: list[float] = []
        queues: dict[str, float] = defaultdict(float)
        for op in ops:
            seconds = _alone(costs, op)
            queues[op.queue] += seconds
            path.append(max((path[other] for other in op.after), default=0.0) + seconds)
        assert timeline.step >= max(path) - SLACK
        assert timeline.step >= max(queues.values()) - SLACK
        for span in timeline.of(name):
            assert span.end - span.start >= _alone(costs, span.op) - SLACK


def _keeps_its_order_and_runs_nothing_twice_at_once(drawn: Trace, timeline: Timeline) -> None:
    assert len(timeline.spans) == sum(len(ops) for ops in drawn.ops.values())
    for name in drawn.ops:
        spans = timeline.of(name)
        assert [span.op.index for span in spans] == list(range(len(spans)))
        queues, engines = defaultdict(list), defaultdict(list)
        for span in spans:
            assert span.ready <= span.start <= span.end
            for other in span.op.after:
                assert spans[other].end <= span.ready
            queues[span.op.queue].append(span)
            if span.end > span.start:
                engines[span.engine].append(span)
        for queue in queues.values():
            assert all(first.end <= then.ready for first, then in pairwise(queue))
        for engine in engines.values():
            ordered = sorted(engine, key=lambda span: span.start)
            assert all(first.end <= then.start for first, then in pairwise(ordered))


def _computes_in_every_moment_or_explains_it(timeline: Timeline) -> None:
    for name, bubbles in timeline.bubbles_by_class.items():
        busy = sorted((s.start, s.end) for s in timeline.of(name) if s.op.queue.startswith("compute"))
        length, until = 0.0, 0.0
        for start, end in busy:
            length += max(0.0, end - max(start, until))
            until = max(until, end)
        assert length + bubbles.total == pytest.approx(timeline.step, abs=SLACK)
    masked = timeline.masked.blocked
    assert masked is None or -SLACK <= masked <= 1


def _has_the_memory_that_its_ops_keep(drawn: Trace, timeline: Timeline) -> None:
    for name, ops in drawn.ops.items():
        curve = timeline.memory(name)
        freed = {storage for op in ops for storage in op.frees}
        left = sum(held.bytes for op in ops for held in op.allocates if held.storage not in freed)
        assert curve.total[-1] == left
        assert timeline.peak_of(name).bytes == max(curve.total)
        assert list(curve.times) == sorted(curve.times)
