"""Runs that are declared in epochs: steps from the data, the schedule's end, the run file that they leave."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_run import metrics, run, run_config

from hyper_parallel.config import load
from hyper_parallel.errors import ConfigError
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.epochs import epochs_line, with_steps


def test_epochs_become_steps_and_a_longer_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": None, "epochs": 0.02, "schedule": {"name": "linear", "warmup": 0.3, "floor": 0.1}}
    config = run_config(tmp_path, train={**train, "engine": "eager"})
    rows = unsharded(config)[1].order.length
    steps = math.ceil(0.02 * rows / 8)
    assert steps > 2
    summary = run(config)
    assert summary.steps == steps
    rates = metrics(config, "lr")
    assert rates[steps] == pytest.approx(3e-4) and max(rates.values()) == pytest.approx(3e-3)
    out = "".join(capfd.readouterr())
    assert epochs_line(0.02, rows, steps) in " ".join(out.split())
    assert "train.epochs=0.04" in " ".join(out.split())
    again = load(Path(config.out) / "run.yaml", ["train.epochs=0.04"])
    longer = run(again)
    assert (longer.resumed_from, longer.steps) == (steps, math.ceil(0.04 * rows / 8))
    assert json.loads((Path(config.out) / "summary.json").read_text())["steps"] == longer.steps


def test_a_warm_up_longer_than_the_epochs_is_refused_with_both_numbers(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": None, "epochs": 0.001, "schedule": {"warmup": 5000}})
    text = unsharded(config)[1]
    with pytest.raises(
        ConfigError, match=r"0.001 epochs of [\d,]+ sequences: \d+ steps?, and 'schedule.warmup' \(5000\)"
    ):
        with_steps(config, text)


def test_the_words_of_one_and_of_several() -> None:
    assert epochs_line(3, 412, 155) == "3 epochs of 412 sequences: 155 steps"
    assert epochs_line(1, 1, 1) == "1 epoch of 1 sequence: 1 step"
