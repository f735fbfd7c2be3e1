"""The trace's structure: what Perfetto's importer of the Trace Event Format needs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from harness.traces import Ops, toy, trace
from hyper_parallel.report import perfetto
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Timeline


@pytest.fixture(scope="module")
def events(timeline: Timeline) -> list[dict[str, Any]]:
    return json.loads(perfetto(timeline))["traceEvents"]


def _of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs(events: list[dict[str, Any]]) -> None:
    needs = {
        "M": {"args"},
        "X": {"ts", "dur", "cat"},
        "C": {"ts", "args"},
        "s": {"ts", "id"},
        "f": {"ts", "id", "bp"},
    }
    assert {event["ph"] for event in events} == set(needs)
    for event in events:
        assert {"pid", "tid", "name", *needs[event["ph"]]} <= event.keys()
        assert event.get("dur", 1) > 0
        assert event.get("ts", 0) >= 0
    assert all(isinstance(value, int) for event in _of(events, "C") for value in event["args"].values())


def test_slices_of_a_track_do_not_overlap(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict(list)
    for event in _of(events, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in _of(events, "M") if e["name"] == "thread_name"}
    assert sorted(named.values()) == ["comm:shard", "comm:tensor", "matrix", "vector"]
    assert tracks.keys() == named.keys()
    for slices in tracks.values():
        assert all(first[1] <= then[0] + 1e-6 for first, then in pairwise(sorted(slices)))


def test_slices_are_the_spans(timeline: Timeline, events: list[dict[str, Any]]) -> None:
    spans = [span for span in timeline.spans if span.end > span.start]
    slices = [event for event in _of(events, "X") if event["cat"] != "wait"]
    assert len(slices) == len(spans)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.step * 1e6)
    matmul = next(event for event in slices if event["name"] == "gate")
    assert matmul["args"] | {"op": 0} == {
        "op": 0, "module": "model.layers.0.mlp", "phase": "forward", "queue": "compute", "kind": "matmul",
        "dtype": "bfloat16", "shape": "1×4096×1792×4096", "flops": 2 * 4096 * 1792 * 4096,
        "bytes": 2 * (4096 * 1792 + 1792 * 4096 + 4096 * 4096),
    }  # fmt: skip
    gather = next(event for event in slices if event["name"] == "all_gather (shard)")
    assert gather["args"]["axis"] == "shard"
    assert gather["args"]["ranks"] == 8


def test_flows_lead_from_a_collective_to_what_waits_for_it(events: list[dict[str, Any]]) -> None:
    starts, ends = ({event["id"]: event for event in _of(events, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(_of(events, "s"))
    slices = {(event["tid"], event["ts"]): event for event in _of(events, "X")}
    for flow, start in starts.items():
        call, waiter = slices[start["tid"], start["ts"]], slices[ends[flow]["tid"], ends[flow]["ts"]]
        assert "axis" in call["args"]
        assert "axis" not in waiter["args"]
        assert call["ts"] + call["dur"] <= waiter["ts"] + 1e-6


def test_counters_hold_the_memory(timeline: Timeline, events: list[dict[str, Any]]) -> None:
    totals = [sum(event["args"].values()) for event in _of(events, "C")]
    assert max(totals) == timeline.peak.bytes
    assert totals[-1] == timeline.memory("all").total[-1]


def test_a_wait_for_other_ranks_is_a_slice_of_its_own() -> None:
    fast, slow = Ops(), Ops()
    for ops, seconds in ((fast, 1), (slow, 5)):
        kernel = ops.kernel("work", seconds, allocates=(Bytes(1, 8, "activation", "host"),))
        ops.send("reduce", 3, (0, 1), kernel, kind="all_reduce", tag="r")
    written = json.loads(perfetto(simulate(trace(fast, slow), toy())))
    waits = [event for event in written["traceEvents"] if event.get("cat") == "wait" and event["ph"] == "X"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in waits] == [(1, 1e6, 4e6)]
    names = [e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"]
    assert names == ["predicted · class 0 · ranks 0", "predicted · class 1 · ranks 1"]
    assert written["otherData"]["predicted"] is True
    assert written["otherData"]["source"] == "made up for a test"
    assert {e["name"] for e in written["traceEvents"] if e["ph"] == "C"} == {"host memory"}


def test_flows_pass_through_ops_that_take_no_time() -> None:
    ops = Ops()
    call = ops.send("gather", 3, (0, 1))
    ops.kernel("use", 1, ops.kernel("view", 0, call))
    written = json.loads(perfetto(simulate(trace(ops), toy())))["traceEvents"]
    assert [event["ts"] for event in written if event["ph"] == "f"] == [3e6]
