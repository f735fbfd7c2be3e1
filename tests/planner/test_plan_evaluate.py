"""Estimates of the runs of a CSV: an object a row, in order, with nothing measured seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hyper_parallel.planner import error_interval
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.csv_runs.cells import MEASURED
from hyper_parallel.planner.csv_runs.evaluate import evaluate, text
from planner.published_run import RUN

FIGURES = {"step_time_s", "tokens_per_s_per_device", "mfu", "peak_memory_gb", "fits", "interval", "filled"}


@pytest.fixture(autouse=True)
def quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_interval, "quantiles", lambda: {"dense": 0.2, "mixture": 0.5})


def told(*records: dict[str, Any]) -> list[dict[str, Any]]:
    return evaluate(records, Constants())


def test_an_object_a_row_in_the_same_order() -> None:
    first, second, third = told(
        RUN, {**RUN, "row_id": "8", "tp": "x"}, {**RUN, "row_id": "9", "n_devices": "32"}
    )
    assert first.keys() >= FIGURES and [first["row_id"], third["row_id"]] == ["7", "9"]
    assert "column tp" in second["unsupported"] and not FIGURES & second.keys()
    assert third["step_time_s"] < first["step_time_s"]
    json.dumps([first, second, third], allow_nan=False)


def test_figures_agree_with_each_other() -> None:
    (one,) = told(RUN)
    rate = 64 * 8192 / 16 / one["step_time_s"]
    assert one["tokens_per_s_per_device"] == pytest.approx(rate)
    low, high = one["interval"]
    assert low < rate < high
    assert 0.1 < one["mfu"] < 0.9 and one["fits"] is True and 10 < one["peak_memory_gb"] < 80


def test_what_cannot_fit_is_said() -> None:
    (one,) = told({**RUN, "model": "", "layers": "320", "hidden": "16384", "heads": "128", "params_b": ""})
    assert one["fits"] is False and one["peak_memory_gb"] > 80


def test_nothing_measured_is_seen() -> None:
    assert told(RUN) == told({**RUN, **dict.fromkeys(MEASURED, "31337"), "notes": "31337 tokens/s"})


def test_rows_without_one_estimate() -> None:
    assert told({**RUN, "gbs": ""})[0]["unsupported"]
    assert told() == []


def test_the_text_names_each_row_and_counts() -> None:
    shown = text(told(RUN, {**RUN, "gbs": ""}))
    assert (
        "1 of 2 rows" in shown and "llama-3-8b" in shown and "unsupported: the column gbs is empty" in shown
    )
