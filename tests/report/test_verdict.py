"""The sentence that a predicted or measured step begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.traces import Ops, one_f_one_b, toy, trace
from hyper_parallel.report import page
from hyper_parallel.report.sheets import verdict
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Timeline


def test_it_says_how_long_whether_it_fits_and_what_dominates(timeline: Timeline) -> None:
    told = verdict(timeline)
    assert told.startswith("simulated: a step takes ")
    assert f"MFU {timeline.mfu:.1%}" in told and "it fits into the device's memory (" in told
    assert "% of it is exposed communication, mostly over shard" in told
    assert verdict(replace(timeline, predicted=False)).startswith("measured: a step takes ")


def test_what_does_not_fit_is_said() -> None:
    ops = Ops()
    ops.kernel("k", 1)
    ran = trace(ops, resident=[Bytes(1, 4 * 10**15, "parameter")])
    assert "DOES NOT FIT" in verdict(simulate(ran, toy()))


def test_a_bubble_can_dominate() -> None:
    told = verdict(simulate(one_f_one_b(8, 1, 1.0, 2.0), toy()))
    assert told.endswith("% of it is filling and draining the pipeline")


def test_tasks_of_a_pipeline_are_no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = simulate(one_f_one_b(2, 32, 1.0, 2.0), toy())
    assert "% of it is computation, mostly matmul" in verdict(timeline)
    kinds = {"task": timeline.by_kind()["matmul"]}
    monkeypatch.setattr(Timeline, "by_kind", lambda self: kinds)
    assert "% of it is tasks of pipeline stages" in verdict(timeline)


def test_the_page_leads_with_it(timeline: Timeline) -> None:
    text = page(timeline)
    assert (
        0 < text.index('<p class="verdict">') < text.index("constants:") < text.index('<div class="cards">')
    )
