"""The queue clock beside the engine: on queues that share nothing, both say when everything ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.traces import Ops, toy, trace
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.host_queue import QueueClock
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.workload.work import Work

QUEUES = (
    *("copy:device>host", "copy:host>device", "copy:device>pool", "copy:pool>device"),
    *("comm:shard", "host"),
)
"""No two use the same direction of a link or of a tier."""

Step = tuple[str, int, int]
"""What is done (`run`, `wait`, or the name of a queue), seconds or bytes, and a number that draws an earlier one."""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("run", "wait", "wait", *QUEUES)), st.integers(0, 9), st.integers(0, 99)),
        max_size=30,
    ),
    st.sampled_from([0.0, 0.25]),
)
def test_the_clock_is_the_simulator(program: list[Step], latency: float) -> None:
    cluster = toy(latency=latency)
    costs = Costs(cluster, ranks=2)
    clock: QueueClock[str] = QueueClock()
    ops, last = Ops(), ()
    begun: list[tuple[int, float]] = []
    """The op of each transfer, and its end by the clock."""
    expected: dict[int, float] = {}
    for what, size, number in program:
        if what == "run":
            last = (ops.kernel("kernel", size, *last),)
            clock.run(size)
        elif what == "wait":
            if not begun:
                continue
            op, end = begun[number % len(begun)]
            last = (ops.add("wait", "compute", (op,)),)
            late = clock.wait(end)
            assert late >= 0
        else:
            # A transfer may need an earlier one, on whatever queue.
            needs = begun[number % len(begun)] if begun and number % 2 else None
            after = (*last, *(() if needs is None else needs[:1]))
            if what == "host":
                work = Work("optimizer", read=size, written=size)
                index = ops.add(what, what, after, work=work)
                seconds = costs.seconds(ops.ops[index])
            elif what == "comm:shard":
                index = ops.send(what, size, (0, 1), *after, kind="all_reduce")
                seconds = sum(leg.latency + leg.seconds for leg in costs.legs(ops.ops[index].collective))
            else:
                index = ops.copy(what, size, what.removeprefix("copy:"), *after)
                seconds = sum(leg.latency + leg.seconds for leg in costs.copy(ops.ops[index]))
            promised = clock.end(what, seconds, needs[1] if needs else 0.0)
            end = clock.begin(what, seconds, needs[1] if needs else 0.0)
            assert promised == end == clock.free[what]
            begun.append((index, end))
            expected[index] = end
            continue
        expected[last[0]] = clock.now
    spans = simulate(trace(ops), cluster).of("all")
    assert [span.end for span in spans] == pytest.approx([expected[at] for at in range(len(spans))])


def test_a_kernel_that_starts_beside_a_transfer_takes_longer() -> None:
    clock: QueueClock[str] = QueueClock(slowdown=2.0)
    clock.run(1.0)
    end = clock.begin("link", 3.0)
    clock.run(1.0)
    assert (end, clock.now) == (4.0, 3.0)
    assert clock.wait(end) == 1.0
    clock.run(1.0)
    assert (clock.now, clock.wait(end)) == (5.0, 0.0)


def test_a_step_that_is_counted_from_its_own_begin_finds_what_is_under_way() -> None:
    clock: QueueClock[str] = QueueClock()
    clock.begin("link", 3.0)
    clock.run(2.0)
    clock.shift(2.0)
    assert clock.now == 0.0
    assert clock.begin("link", 1.0) == 2.0
