"""Traces whose times are known from arithmetic."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from harness.traces import Ops, one_f_one_b, times, toy, trace
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError, TraceError
from hyper_parallel.simulator import alone, simulate
from hyper_parallel.simulator.engine import Only, Run
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Trace


def test_kernels_run_one_after_the_other() -> None:
    ops = Ops()
    ops.kernel("a", 2)
    ops.kernel("b", 3, kind="elementwise")
    timeline = simulate(trace(ops), toy())
    assert times(timeline) == {"a": (0, 2), "b": (2, 5)}
    assert [span.engine for span in timeline.spans] == ["matrix", "vector"]


def test_the_critical_path_goes_through_the_longer_branch() -> None:
    ops = Ops()
    a = ops.kernel("a", 2)
    gather = ops.send("gather", 5, (0, 1), a)
    b = ops.kernel("b", 1, a)
    ops.kernel("c", 4, gather, b)
    d = ops.send("reduce", 1, (0, 1), b)
    ops.kernel("d", 1, d)
    timeline = simulate(trace(ops), toy())
    # The second call waits for the first in its queue, and d for c in its own.
    assert times(timeline) == {
        "a": (0, 2), "gather": (2, 7), "b": (2, 3), "c": (7, 11), "reduce": (7, 8), "d": (11, 12)
    }  # fmt: skip
    assert timeline.exposed == 4


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # n = 8, α = 1, β = 1, B = 16
        ("all_reduce", 2 * 7 * (1 + 16 / 8)),
        ("all_gather", 7 * (1 + 16)),
        ("reduce_scatter", 7 * (1 + 16 / 8)),
        ("all_to_all", 7 * (1 + 16 / 8)),
        ("send", 1 + 16),
    ],
)
def test_collectives_on_one_level(kind: str, seconds: float) -> None:
    ops = Ops()
    ops.send("call", 16, range(8) if kind != "send" else (0, 1), kind=kind)
    assert simulate(trace(ops, ranks=8), toy(latency=1)).step == seconds


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # g = 4 inside at β = 1, k = 2 across at β = 1/4, α = 1, B = 16
        ("all_reduce", 3 * (1 + 16 / 4) + 2 * (1 + 4 / (2 / 4)) + 3 * (1 + 4)),
        ("all_gather", (1 + 16 * 4) + 3 * (1 + 32)),
        ("reduce_scatter", 3 * (1 + 16 / 4) + (1 + 4 / (2 / 4))),
        ("all_to_all", 3 * (1 + 16 / 4) + (1 + 16 / (2 / 4))),
    ],
)
def test_collectives_on_two_levels(kind: str, seconds: float) -> None:
    ops = Ops()
    ops.send("call", 16, range(8), kind=kind)
    assert simulate(trace(ops, ranks=8), toy(latency=1, network=0.25, node=4)).step == seconds


def test_the_algorithm_can_be_flat() -> None:
    ops = Ops()
    ops.send("call", 16, range(8), kind="all_reduce")
    cluster = toy(latency=1, network=0.25, node=4)
    assert simulate(trace(ops, ranks=8), cluster, algorithm="flat").step == 2 * 7 * (1 + 16 / (8 / 4))


def test_two_equal_collectives_at_once_take_twice_as_long() -> None:
    ops = Ops()
    ops.send("a", 6, (0, 1), axis="shard")
    ops.send("b", 6, (0, 1), axis="tensor")
    assert times(simulate(trace(ops), toy())) == {"a": (0, 12), "b": (0, 12)}


def test_staggered_collectives_share_only_while_both_run() -> None:
    ops = Ops()
    wait = ops.kernel("wait", 4)
    ops.send("a", 6, (0, 1), axis="shard")
    ops.send("b", 6, (0, 1), wait, axis="tensor")
    # a has 2 of its 6 left at 4, which take 4 at half the rate; b has then done 2, and 4 are left.
    assert times(simulate(trace(ops), toy())) == {"wait": (0, 4), "a": (0, 8), "b": (4, 12)}


def test_a_latency_uses_no_bandwidth() -> None:
    ops = Ops()
    ops.send("a", 6, (0, 1), axis="shard")
    ops.send("b", 6, (0, 1), axis="tensor")
    # Both latencies pass beside each other; of the bandwidth each has half.
    assert simulate(trace(ops), toy(latency=1)).step == 1 + 12


def test_collectives_on_different_levels_do_not_share() -> None:
    ops = Ops()
    ops.send("inside", 6, (0, 1), axis="tensor")
    ops.send("across", 6, (0, 2), axis="shard")
    assert simulate(trace(ops, ranks=4), toy(node=2)).step == 6


def test_a_collective_over_two_levels_shares_each_only_during_its_legs() -> None:
    ops = Ops()
    # A reduce-scatter of 8: inside 8/2 = 4 s, then across 4/2 = 2 s. The network's other call begins with it.
    ops.send("levels", 8, range(4), kind="reduce_scatter", axis="shard")
    ops.send("across", 5, (0, 2), axis="data")
    # Until 4 each is alone; from 4 on they share: 1 is left of the one, 2 of the other.
    assert times(simulate(trace(ops, ranks=4), toy(node=2))) == {"levels": (0, 7), "across": (0, 6)}


def test_kernels_are_slowed_only_while_a_collective_runs() -> None:
    ops = Ops()
    first = ops.kernel("before", 2)
    ops.kernel("beside", 6)
    ops.send("call", 4, (0, 1), first)
    # From 2 to 6 at half the rate: 2 of 6 are done, and 4 are left.
    assert times(simulate(trace(ops), toy(slowdown=2))) == {
        "before": (0, 2),
        "beside": (2, 10),
        "call": (2, 6),
    }


def test_a_kernel_that_begins_beside_a_collective_speeds_up_after_it() -> None:
    ops = Ops()
    ops.send("call", 4, (0, 1))
    ops.kernel("beside", 6)
    assert times(simulate(trace(ops), toy(slowdown=2)))["beside"] == (0, 8)


def test_engines_overlap_when_the_trace_says_so() -> None:
    ops = Ops()
    ops.kernel("matrix", 4)
    ops.kernel("vector", 3, queue="compute:vector", kind="elementwise")
    # The vector engine is taken: this one waits for it, though its queue is free.
    ops.kernel("vector too", 3, queue="compute:more", kind="elementwise")
    timeline = simulate(trace(ops), toy())
    assert times(timeline) == {"matrix": (0, 4), "vector": (0, 3), "vector too": (3, 6)}
    assert timeline.computing == 6


def test_copies_run_at_the_tiers_bandwidth_and_share_it_in_one_direction() -> None:
    ops = Ops()
    ops.copy("out", 6, "device>host")
    ops.copy("in", 6, "host>device")
    # The host is written at 1 B/s and read at 2 B/s, each way by itself.
    assert times(simulate(trace(ops), toy())) == {"out": (0, 6), "in": (0, 3)}
    both = Ops()
    both.copy("out", 6, "device>host")
    both.copy("on", 6, "pool>host")
    assert simulate(trace(both), toy()).step == 12


def test_a_collective_waits_for_all_its_classes() -> None:
    fast, slow = Ops(), Ops()
    for ops, seconds in ((fast, 1), (slow, 5)):
        kernel = ops.kernel("work", seconds)
        ops.send("reduce", 3, (0, 1), kernel, kind="all_to_all", tag="r")
    timeline = simulate(trace(fast, slow), toy())
    for name in ("class 0", "class 1"):
        assert times(timeline, name)["reduce"] == (5, 6.5)
    assert [span.ready for span in timeline.spans if span.op.collective] == [1, 5]
    bubbles = timeline.bubbles_by_class["class 0"]
    assert (bubbles.imbalance, bubbles.communication, bubbles.fill_drain) == (4, 1.5, 0)


@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (4, 4), (4, 12), (8, 16), (3, 1)])
def test_the_bubble_of_1f1b(stages: int, batches: int) -> None:
    forward, backward = 1.0, 2.0
    timeline = simulate(one_f_one_b(stages, batches, forward, backward), toy())
    bubble = (stages - 1) * (forward + backward)
    assert timeline.step == batches * (forward + backward) + bubble
    for found in timeline.bubbles_by_class.values():
        assert found.fill_drain == bubble
        assert found.total == bubble


def test_masking_by_both_definitions() -> None:
    ops = Ops()
    ops.send("call", 4, (0, 1))
    ops.kernel("beside", 3)
    # At two thirds of the rate: 8/3 done by 4, so the kernel ends at 13/3.
    timeline = simulate(trace(ops), toy(slowdown=1.5))
    assert timeline.step == pytest.approx(4 + 1 / 3)
    assert timeline.alone is not None
    assert (timeline.alone.compute, timeline.alone.communication) == (3, 4)
    assert timeline.masked.blocked == 1
    assert timeline.masked.end_to_end == pytest.approx((7 - 13 / 3) / 4)


def test_the_times_alone_are_simulated_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str | None] = []

    class Counted(Run):
        def __init__(self, of: Trace, costs: Costs, only: Only | None = None) -> None:
            runs.append(only)
            super().__init__(of, costs, only)

    # The package names the function as it names this module.
    monkeypatch.setattr(sys.modules["hyper_parallel.simulator.simulate"], "Run", Counted)
    ops = Ops()
    ops.kernel("alone", 3)
    timeline = simulate(trace(ops), toy())
    assert timeline.step == 3
    assert runs == [None]
    assert timeline.alone is timeline.alone
    assert runs == [None, "compute", "comm"]


def test_the_times_alone_keep_the_order_of_the_ranks() -> None:
    stages = one_f_one_b(4, 8, 1.0, 2.0)
    assert alone(stages, toy(), "compute") == 8 * 3 + 9
    assert alone(stages, toy(), "comm") == 0


def test_no_masking_without_communication() -> None:
    ops = Ops()
    ops.kernel("a", 1)
    masked = simulate(trace(ops), toy()).masked
    assert masked.blocked is None
    assert masked.end_to_end is None


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    one, two = Ops(), Ops()
    for ops, order in ((one, "ab"), (two, "ba")):
        for tag in order:
            ops.send(f"call {tag}", 1, (0, 1), tag=tag, kind="all_reduce")
    with pytest.raises(
        TraceError, match=r"'class 0' \(op 0, call a\) waits for 'class 1' in call 1 tagged 'a'.*same order"
    ):
        simulate(trace(one, two), toy())


def test_a_cluster_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="describes no device"):
        simulate(trace(Ops()), Cluster(node=8))


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(TraceError, match=r"ranks up to 7 .* 4 devices"):
        simulate(trace(Ops(), ranks=8), toy(ranks=4))


def test_a_timeline_says_where_its_constants_come_from() -> None:
    known = simulate(trace(Ops()), toy())
    assert (known.cluster, known.source) == ("toy", "made up for a test")
    guessed = simulate(trace(Ops()), toy(estimates={"device.launch": "as of others"}))
    assert guessed.source == "made up for a test (1 estimate among them)"


def test_an_empty_trace_takes_no_time() -> None:
    timeline = simulate(Trace({}, {}), toy())
    assert timeline.step == 0
    assert timeline.mfu is None


def test_a_run_can_be_repeated_exactly() -> None:
    ops = Ops()
    for place in range(40):
        kernel = ops.kernel(f"k{place}", 0.1 * (1 + place % 7))
        ops.send(f"c{place}", 1 + place % 3, (0, 1), kernel, axis=("shard", "tensor")[place % 2])
    first, second = (simulate(trace(ops), toy(slowdown=1.3, latency=0.01)).spans for _ in range(2))
    assert first == second
    assert all(a.start <= b.start for a, b in pairwise(s for s in first if s.op.queue == "compute"))
