"""Runs with `roles: auto` on real workers: measured once, trained to the end, and gone on with in the same layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.rl_faults import left_behind
from harness.rl_runs import rl_config
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl import role_measurement
from hyper_parallel.rl.role_split import plan_split
from hyper_parallel.rl.run import run

AUTO: dict[str, Any] = {"split": "auto", "devices": 2, "rollout": {"page": 16}}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_measurement, "ROUNDS", 1)


def config_of(out: Path, **rl: Any) -> RLConfig:
    return rl_config(
        out,
        roles=AUTO,
        rl={"staleness": 1, "kl": 0.1, **rl},
        warmup={"steps": 2, "batch": 8},
        checkpoint={"every": 1},
    )


def test_a_run_is_split_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, told = tmp_path / "run", list[str]()
    choice = plan_split(config_of(out), told=told.append)
    assert not left_behind()
    assert {one.layout.together for one in choice.predictions} == {True, False}
    assert choice.line.startswith("roles: ")
    assert "predicted" in choice.line
    assert "next best: " in choice.line
    assert told[-1] == choice.line
    assert "predicted: a step of each layout" in choice.table()
    kept = json.loads((out / "split.json").read_text())
    assert kept["measured"]["lengths"]
    for kind in ("together", "apart"):
        times = kept["measured"][kind]
        assert len(times["train"]) >= role_measurement.ROUNDS
        assert len(times["score"]) >= role_measurement.ROUNDS
        assert len(times["waves"]) >= 3 * role_measurement.ROUNDS

    # The run measures nothing, and neither warms up again.
    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(role_measurement.Measurement, "measured", never)
    told.clear()
    first = run(config_of(out), told=told.append)
    assert first.steps == 3
    assert first.resumed_from is None
    assert not [line for line in told if line.startswith("warm-up")]
    assert f"chosen before: {out}/split.json" in told[0]
    workers = 2 if choice.layout.together else 1
    assert f"starting actor ({workers} worker" in "\n".join(told)
    assert first.failed_rewards == 0
    # It goes on in the same layout.
    told.clear()
    second = run(config_of(out, steps=4), told=told.append)
    assert (second.resumed_from, second.steps) == (3, 4)
    assert f"starting actor ({workers} worker" in "\n".join(told)
    assert json.loads((out / "split.json").read_text()) == kept
    assert not left_behind()


def test_a_run_measures_before_its_first_step(tmp_path: Path) -> None:
    """Without a warm-up there is nothing to save; metrics are those of the run alone."""
    told = list[str]()
    summary = run(rl_config(tmp_path / "run", roles=AUTO), told=told.append)
    assert summary.steps == 3
    assert [line for line in told if line.startswith("roles: ")]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if "reward" in one] == [1, 2, 3]
    assert not left_behind()


def test_one_layout_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_measurement.Measurement, "measured", None)
    told = list[str]()
    assert run(rl_config(tmp_path / "run", roles={**AUTO, "devices": 1}), told=told.append).steps == 3
    assert (
        told[0]
        == "roles: 1 device trains and generates in turn; there is no other layout, and nothing was measured"
    )


def test_a_layout_whose_workers_are_lost_is_left_out(tmp_path: Path) -> None:
    told = list[str]()
    config = rl_config(tmp_path / "run", roles=AUTO)
    choice = plan_split(config, told=told.append, host="harness.rl_hosts:DiesApart")
    assert [one.layout.together for one in choice.predictions] == [True]
    assert "next best" not in choice.line
    assert [line for line in told if line.startswith("left out, because its workers were lost: ")]
    assert not left_behind()


def test_stopped_while_it_measures(tmp_path: Path) -> None:
    summary = run(rl_config(tmp_path / "run", roles=AUTO), stop=lambda: True)
    assert (summary.stopped, summary.steps) == (True, 0)
    assert not (tmp_path / "run" / "split.json").exists()
    assert not left_behind()
