"""A Trace that cannot run is refused, with what would mend it; names and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.traces import Ops, toy, trace
from hyper_parallel.errors import TraceError
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import (
    Bytes,
    Op,
    Trace,
    copy_tiers,
    dump_timeline,
    dump_trace,
    load_timeline,
    load_trace,
    pattern,
)
from hyper_parallel.trace.serialize import _runs, _unrun
from hyper_parallel.workload.work import Work


def _two() -> tuple[Ops, Ops]:
    one, two = Ops(), Ops()
    for ops in (one, two):
        ops.kernel("work", 1, allocates=(Bytes(1, 8, "activation"),), frees=(1,))
    return one, two


def _cycle(one: Ops, two: Ops) -> None:
    one.kernel("late", 1, 5)


def _own(one: Ops, two: Ops) -> None:
    one.kernel("self", 1, 1)


def _misplaced(one: Ops, two: Ops) -> None:
    one.ops.append(Op(7, "seven"))


def _queue(one: Ops, two: Ops) -> None:
    one.kernel("k", 1, queue="computer")


def _not_sent(one: Ops, two: Ops) -> None:
    one.kernel("k", 1, queue="comm:shard")


def _sent_elsewhere(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 1), queue="compute")


def _both(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 1), work=Work("matmul"))


def _twice(one: Ops, two: Ops) -> None:
    one.kernel("again", 1, allocates=(Bytes(1, 8, "activation"),))


def _freed_twice(one: Ops, two: Ops) -> None:
    one.kernel("again", 1, frees=(1,))


def _never(one: Ops, two: Ops) -> None:
    one.kernel("free", 1, frees=(9,))


def _outside(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 4))


def _not_mine(one: Ops, two: Ops) -> None:
    one.send("s", 1, (1, 1))


def _one_sided(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 1), kind="all_reduce", tag="t")


def _kinds(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 1), kind="all_reduce", tag="t")
    two.send("s", 1, (0, 1), kind="all_gather", tag="t")


def _both_send(one: Ops, two: Ops) -> None:
    one.send("s", 1, (0, 1), tag="t")
    two.send("s", 1, (0, 1), tag="t")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cycle, r"op 1 \(late\) of class 'class 0' waits for op 5, which is not before it"),
        (_own, "waits for op 1, which is not before it"),
        (_misplaced, r"op 7 \(seven\) .* stands at place 1"),
        (_queue, "queue 'computer'; a queue is compute"),
        (_not_sent, "has no collective; only they run there"),
        (_sent_elsewhere, "a collective on queue 'compute'; it needs"),
        (_both, "both work and a collective"),
        (_twice, "allocates storage 1, which was there before"),
        (_freed_twice, "frees storage 1, which was already freed"),
        (_never, "frees storage 9, which was never allocated"),
        (_outside, r"calls ranks \[4\]; the trace has 2 ranks, 0 to 1"),
        (_not_mine, "none of them is of its class"),
        (_one_sided, "call 1 tagged 't' .* is made by op 1 .* and not by 'class 1'"),
        (_kinds, "of different kinds: 'all_gather', 'all_reduce'"),
        (_both_send, "is a send on every side"),
    ],
)
def test_what_cannot_run_is_refused(spoil: Callable[[Ops, Ops], None], message: str) -> None:
    one, two = _two()
    trace(one, two).check()
    spoil(one, two)
    with pytest.raises(TraceError, match=message):
        trace(one, two).check()


def test_ranks_and_classes_must_go_together() -> None:
    good = trace(*_two())
    for bad, message in (
        (replace(good, classes={0: "class 0", 1: "class 1", 2: "other"}), "rank 2 is of class 'other'"),
        (replace(good, classes={0: "class 0"}), "no rank is of class 'class 1'"),
        (replace(good, resident={"class 0": (Bytes(3, 1, "input"), Bytes(3, 1, "input"))}), "twice"),
    ):
        with pytest.raises(TraceError, match=message):
            bad.check()


def test_calls_of_one_tag_meet_in_order_and_of_other_groups_apart() -> None:
    one, two = Ops(), Ops()
    for ops, kernel in ((one, 1), (two, 3)):
        ops.send("first", 1, (0, 1), ops.kernel("k", kernel), kind="all_to_all", tag="t")
        ops.send("second", 1, (0, 1), kind="all_reduce", tag="t")
    # The same tag within one class is another group: it meets nobody.
    one.send("own", 1, (0, 2), kind="all_reduce", tag="t")
    good = replace(trace(one, two), classes={0: "class 0", 1: "class 1", 2: "class 0"})
    good.check()
    spans = {span.op.name: span for span in simulate(good, toy()).of("class 0")}
    assert spans["first"].start == 3
    assert spans["own"].start == spans["own"].ready


def test_names() -> None:
    assert pattern("model.layers.11.mlp.experts.7.up") == "model.layers.*.mlp.experts.*.up"
    assert pattern("0.weight1.x2") == "*.weight1.x2"
    assert copy_tiers("copy:device>pool") == ("device", "pool")
    assert copy_tiers("copy:device") is None
    assert copy_tiers("compute") is None


def _rich() -> Trace:
    ops = Ops()
    held = Bytes(2, 64, "activation", name="kept")
    a = ops.kernel("a", 0.1, module="model.layers.0", phase="forward", allocates=(held,))
    b = ops.send(
        "b", 3, range(8), a, kind="all_reduce", tag="t", allocates=(Bytes(3, 9, "temporary", "host"),)
    )
    ops.kernel("a", 0.1, b, module="model.layers.0", phase="backward", recomputed=True, frees=(2, 3))
    ops.copy("c", 7, "device>host")
    ops.add("nothing", "host")
    return trace(ops, ranks=8, resident=[Bytes(1, 5, "parameter")], model_flops=12.5, micro_batches=3)


def test_json_brings_back_what_was_written() -> None:
    made = _rich()
    assert load_trace(dump_trace(made)) == made
    timeline = simulate(made, toy(latency=0.1, slowdown=1.3))
    again = load_timeline(dump_timeline(timeline))
    assert again == timeline
    assert again.bubbles == timeline.bubbles
    assert dump_timeline(again) == dump_timeline(timeline)


def test_json_keeps_the_waits_for_other_ranks() -> None:
    one, two = Ops(), Ops()
    for ops, seconds in ((one, 1), (two, 3)):
        ops.send("reduce", 1, (0, 1), ops.kernel("k", seconds), kind="all_reduce")
    timeline = simulate(trace(one, two), toy())
    assert timeline.bubbles.imbalance == 1
    assert load_timeline(dump_timeline(timeline)) == timeline


def test_json_is_compact() -> None:
    ops = Ops()
    for _ in range(1000):
        ops.kernel("mm", 1, module="model.layers.0.mlp.up_proj", phase="forward")
    assert len(dump_trace(trace(ops, ranks=4096))) < 20 * 1000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version":1}', '{"version":1,"program":{"names":[]}}'])
def test_other_text_is_refused(text: str) -> None:
    for load in (load_trace, load_timeline):
        with pytest.raises(TraceError, match="not a trace or timeline"):
            load(text)


def test_another_version_is_refused() -> None:
    with pytest.raises(TraceError, match="version 99"):
        load_trace('{"version":99}')


@given(st.lists(st.integers(0, 12), max_size=12))
def test_groups_of_ranks_survive(ranks: list[int]) -> None:
    assert _unrun(_runs(ranks)) == ranks


def test_a_long_group_is_a_few_numbers() -> None:
    assert _runs(range(0, 4096, 8)) == [[0, 512, 8]]
