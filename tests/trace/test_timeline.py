"""What a Timeline says, against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.traces import Ops, one_f_one_b, toy, trace
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Span, Timeline, Trace
from hyper_parallel.workload.work import Work


def _step() -> Trace:
    ops = Ops()
    forward = ops.kernel(
        "mm", 4, module="model.layers.0.mlp", phase="forward", allocates=(Bytes(10, 100, "activation"),)
    )
    gather = ops.send("gather", 6, (0, 1), phase="forward", module="model.layers.1", axis="shard",
                      allocates=(Bytes(11, 30, "parameter"),))  # fmt: skip
    again = ops.kernel("mm", 4, gather, module="model.layers.1.mlp", phase="backward", recomputed=True,
                       allocates=(Bytes(12, 50, "temporary"),), frees=(12,))  # fmt: skip
    ops.copy("out", 1, "device>host", forward, allocates=(Bytes(13, 100, "activation", "host"),), frees=(10,))
    ops.kernel("update", 1, again, kind="optimizer", phase="optimizer", frees=(11,))
    return trace(ops, resident=[Bytes(1, 40, "parameter", name="model.embed.weight")], model_flops=9)


def test_step_mfu_and_exposure() -> None:
    timeline = simulate(_step(), toy())
    assert timeline.step == 11
    assert timeline.mfu == 9 / (11 * 2 * 1)
    # The gather runs from 0 to 6, and the kernel beside it until 4.
    assert timeline.exposed == 2
    assert timeline.computing == 9
    assert timeline.masked.blocked == 1 - 2 / 6
    assert timeline.masked.end_to_end == (9 + 6 - 11) / 6
    assert timeline.word == "predicted"


def test_sums() -> None:
    timeline = simulate(_step(), toy())
    phases = timeline.by_phase()
    assert phases["forward"].compute == 4
    assert phases["forward"].communication == 6
    assert phases["recompute"].compute == 4
    assert phases["optimizer"].total == 1
    assert timeline.by_module()["model.layers.*.mlp"].compute == 8
    assert timeline.by_module()["model.layers.*.mlp"].count == 2
    assert timeline.by_kind()["matmul"].flops == 8
    assert timeline.by_kind()["copy"].copies == 1
    assert {name: row.communication for name, row in timeline.by_axis().items()} == {"shard": 6}


def test_memory_over_time_and_its_peak() -> None:
    timeline = simulate(_step(), toy())
    curve = timeline.memory("all")
    assert list(zip(curve.times, curve.total, strict=True)) == [
        (0, 40), (0, 140), (0, 170), (5, 70), (6, 120), (10, 70), (11, 40)
    ]  # fmt: skip
    assert timeline.trace.tiers == ("device", "host")
    assert timeline.memory("all", "host").by_kind == {"activation": (0, 100)}
    peak = timeline.peak
    assert (peak.bytes, peak.time, peak.rank) == (170, 0, 0)
    assert peak.by_kind == timeline.peak_by_kind() == {"parameter": 70, "activation": 100}
    assert [(alive.held.bytes, alive.name) for alive in peak.alive] == [
        (100, "mm"), (40, "model.embed.weight"), (30, "gather")
    ]  # fmt: skip
    assert peak.alive[0].op is not None
    assert (peak.alive[0].op.module, peak.alive[0].op.phase) == ("model.layers.0.mlp", "forward")
    assert timeline.peak_by_kind("host") == {"activation": 100}


def test_an_op_without_time_still_holds_what_it_makes() -> None:
    ops = Ops()
    ops.kernel("nothing", 0, allocates=(Bytes(1, 7, "temporary"),), frees=(1,))
    timeline = simulate(trace(ops), toy())
    assert timeline.peak.bytes == 7
    assert timeline.memory("all").total[-1] == 0


def test_uneven_stages_are_imbalance_first() -> None:
    # The second stage has twice as much to do.
    ops = [Ops(), Ops()]
    last = ops[0].kernel("f", 1)
    for batch in range(4):
        ops[0].send(f"s{batch}", 0, (0, 1), last, tag="f", axis="pipeline")
        got = ops[1].send(f"r{batch}", 0, (0, 1), tag="f", kind="recv", axis="pipeline")
        ops[1].kernel(f"g{batch}", 2, got)
        if batch < 3:
            last = ops[0].kernel("f", 1)
    timeline = simulate(trace(*ops), toy())
    assert timeline.step == 9
    first, second = timeline.bubbles_by_class.values()
    # The first stage computes 4 of 9 and the second 8: 4 is imbalance, and the 1 until the first arrives is filling.
    assert (first.imbalance, first.fill_drain) == (4, 1)
    assert (second.imbalance, second.fill_drain) == (0, 1)


def _taking_turns() -> Trace:
    """Two ranks that compute equally long in all, and never at once, with an all-reduce after each part."""
    ops = [Ops(), Ops()]
    for part in range(4):
        for rank, of in enumerate(ops):
            kernel = of.kernel("k", 3 if part % 2 == rank else 1, phase="forward")
            of.send("reduce", 2, (0, 1), kernel, kind="all_to_all", tag="r")
            of.ops[kernel] = replace(of.ops[kernel], after=tuple(range(kernel))[-1:])
    return trace(*ops)


def test_waits_within_a_group_are_imbalance_also_when_all_compute_equally_long() -> None:
    timeline = simulate(_taking_turns(), toy())
    # Each waits 2 in two of the four parts, and all wait for four calls of 2 · (n − 1) / n = 1.
    for bubbles in timeline.bubbles_by_class.values():
        assert (bubbles.imbalance, bubbles.fill_drain, bubbles.communication) == (4, 0, 4)
    # What is counted as communication is the calls alone.
    assert timeline.communicating == timeline.by_kind()["all_to_all"].communication == 4


def test_of_equal_peaks_the_first_is_told() -> None:
    ops = Ops()
    for place in range(3):
        ops.kernel(f"k{place}", 1, allocates=(Bytes(place, 5, "temporary"),), frees=(place,))
    assert simulate(trace(ops), toy()).peak.alive[0].name == "k0"


def test_the_peak_of_the_device_is_that_of_the_dtype_of_most_products() -> None:
    ops = Ops()
    ops.kernel("k", 5)
    ops.add("half", "compute", work=Work("matmul", flops=8, dtype="bfloat16"))
    ops.kernel("k", 2)
    cluster = toy()
    assert cluster.device is not None
    device = replace(cluster.device, matrix={"float32": 1.0, "bfloat16": 4.0})
    timeline = simulate(trace(ops, model_flops=4), replace(cluster, device=device))
    assert timeline.peak_flops == 4
    assert timeline.mfu == 4 / (9 * 2 * 4)


def test_waiting_for_a_copy_or_the_host_is_told_apart() -> None:
    ops = Ops()
    back = ops.copy("in", 4, "host>device")
    ops.kernel("k", 1, back)
    timeline = simulate(trace(ops), toy())
    assert timeline.bubbles.copies == 2
    assert timeline.exposed == 0


def test_gaps_of_a_measurement_are_the_runtimes() -> None:
    ops = Ops()
    ops.kernel("a", 1)
    ops.kernel("b", 1)
    ran = trace(ops)
    spans = tuple(
        Span(0, "matrix", start, start + 1, op, start)
        for op, start in zip(ran.ops["all"], (0.5, 3.0), strict=True)
    )
    timeline = Timeline(ran, spans, predicted=False, device="toy")
    assert timeline.word == "measured"
    assert timeline.bubbles.runtime == 2
    assert timeline.bubbles.total == 2
    assert timeline.masked.blocked is None


def test_figures_are_means_over_ranks() -> None:
    timeline = simulate(one_f_one_b(4, 8, 1.0, 2.0), toy())
    assert timeline.computing == 24
    assert timeline.bubbles.fill_drain == pytest.approx(9)
    assert timeline.by_phase()["forward"].compute == 8


def test_what_is_resident_is_the_peak_where_nothing_is_allocated() -> None:
    """From the beginning on."""
    ops = Ops()
    ops.kernel("mm", 4)
    timeline = simulate(trace(ops, resident=[Bytes(1, 40, "parameter")], model_flops=9), toy())
    peak = timeline.peak
    assert (peak.time, peak.bytes) == (0.0, 40)
    assert [(one.held.bytes, one.op, one.since) for one in peak.alive] == [(40, None, 0.0)]
