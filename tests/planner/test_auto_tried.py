"""Strategies that are predicted to be about as quick are tried by the workers."""

from __future__ import annotations

import argparse
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from auto_cases import launched, machine, run_file

from harness.commands import noted
from hyper_parallel import compat
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import entry, measure_candidates
from hyper_parallel.planner.auto.choose import Choice
from hyper_parallel.planner.auto.entry import STRATEGY_FILE

CHOICES = [
    Choice(
        {"train": {"micro_batch": size}, "strategy": {"axes": {"replicate": 1}}},
        f"micro {size}",
        (f"is {size}",),
    )
    for size in (1, 2, 4)
]
ALONE = Worker(0, 0, 1, 1, torch.device("cpu"), compat.backend("cpu"))


def _together(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, seconds: list[float | None]
) -> tuple[RunConfig, list[int | None]]:
    """What one worker takes when tries take so long, and the micro-batches that it tried."""
    asked: list[int | None] = []

    def took(runs: list[RunConfig], worker: Worker, **_: Any) -> list[float | None]:
        asked.extend(one.train.micro_batch for one in runs)
        return seconds[: len(runs)]

    first, *close = CHOICES
    chosen = Choice(first.laid, first.name, first.lines, close=tuple(close))
    monkeypatch.setattr(entry, "machine_of", lambda *_: None)
    monkeypatch.setattr(entry, "choose", lambda *_: chosen)
    monkeypatch.setattr(entry, "tried", took)
    monkeypatch.setattr(entry, "broadcast_text", lambda _, text: text)
    return entry.together(config, ALONE), asked


def test_the_quickest_is_taken_and_what_the_others_took_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = _together(monkeypatch, run_file(tmp_path), [0.3, 0.1, None])
    assert asked == [1, 2, 4] and found.train.micro_batch == 2
    text = (tmp_path / "run" / STRATEGY_FILE).read_text()
    assert "# is 2\n" in text and "# is 1" not in text
    assert (
        "of 3 that were tried, it took the least: 100 ms a step; micro 1: 300 ms; micro 4: not measured"
        in text
    )


def test_where_none_can_be_run_the_least_predicted_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = _together(monkeypatch, run_file(tmp_path), [None, None, None])
    assert found.train.micro_batch == 1


@pytest.mark.parametrize(
    ("strategy", "tries"),
    [
        ({"axes": "auto", "tries": 2}, [1, 2]),
        ({"axes": "auto", "tries": 0}, []),
        ({"axes": "auto", "memory": {"device": "1GiB", "host": "1GiB"}}, [1, 2, 4]),
    ],
)
def test_the_file_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: object, tries: list[int]
) -> None:
    _, asked = _together(monkeypatch, run_file(tmp_path, strategy), [0.3, 0.4, 0.5])
    assert asked == tries


def test_tries_without_anything_open_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tries' says how open axes are planned"):
        run_file(tmp_path, {"axes": {"shard": 2}, "tries": 2})


def test_what_else_the_machine_does_counts_little_and_what_is_slow_is_soon_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    seconds = {
        "quick": itertools.cycle([0.01, 0.03, 0.03]),  # disturbed most of the time
        "steady": itertools.repeat(0.014),
        "slow": itertools.repeat(0.022),
    }

    def one(name: str) -> float:
        taken.append(name)
        return next(seconds[name])

    monkeypatch.setattr(measure_candidates, "_slowest", lambda found, _: found)
    steps = {place: functools.partial(one, name) for place, name in enumerate(seconds)}
    once = dict.fromkeys(steps, 0.01)
    found = measure_candidates._timed(steps, once, ALONE, lambda: False)
    assert found == pytest.approx({0: 0.01, 1: 0.014, 2: 0.022})
    assert taken.count("slow") == measure_candidates.LEAST
    assert taken.count("quick") == taken.count("steady") == measure_candidates.MOST


def test_a_trial_that_fails_between_steps_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_candidates, "_slowest", lambda found, _: found)
    fails = iter([0.1, 0.1, None])
    found = measure_candidates._timed(
        {0: lambda: next(fails), 1: lambda: 0.2}, {0: 0.1, 1: 0.2}, ALONE, lambda: False
    )
    assert found == pytest.approx({1: 0.2})


def test_steps_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_candidates, "_slowest", lambda found, _: found)
    taken: list[int] = []

    def step() -> float:
        taken.append(0)
        return 0.1

    assert measure_candidates._timed({0: step}, {0: 0.1}, ALONE, lambda: True) == pytest.approx({0: 0.1})
    assert len(taken) == 1


SMALL_RUN: dict[str, Any] = {
    "data": {"train": argparse.__file__, "sequence": 64, "tokenizer": {"vocab_size": 512}},
    "train": {"batch": 4, "steps": 3},
    "launch": {"workers": 2},
}


@pytest.mark.parametrize("budget", ["1GiB", "256KiB"])
def test_what_fails_on_one_rank_is_left_on_all_and_told(tmp_path: Path, budget: str) -> None:
    # On rank 1 the text of the first is missing, or no plan keeps the budget on either.
    memory = {"device": budget, "host": "1GiB"}
    sections = {**SMALL_RUN, "data": {**SMALL_RUN["data"], "cache": str(tmp_path)}}
    config = run_file(tmp_path, {"axes": {"replicate": 2}, "memory": memory}, **sections)
    assert launched(config, "try_with_a_failure") == 0
    first, second = (noted(tmp_path, rank) for rank in range(2))
    assert first["seconds"] == second["seconds"]
    missing, within = first["seconds"]
    assert missing is None and (within is None) == (budget == "256KiB")
    assert "strategy 1 of 2 cannot be run: rank " in first["said"]
    assert ("budget of 256.0 KiB is too small" in first["said"]) == (budget == "256KiB")
    assert first["left"] == second["left"] == [0, 1]


def test_trials_end_with_their_time(tmp_path: Path) -> None:
    sections = {**SMALL_RUN, "data": {**SMALL_RUN["data"], "cache": str(tmp_path)}}
    config = run_file(tmp_path, {"axes": {"replicate": 2}}, **sections)
    assert launched(config, "try_without_time") == 0
    first, second = (noted(tmp_path, rank) for rank in range(2))
    assert first["seconds"] == second["seconds"] == [None, None]
    # On a machine that is busy the time may be over before the first one begins.
    late = "strategy 1 of 2 cannot be run: rank " in first["said"]
    assert ("longer than the time that is left" in first["said"]) == late
    assert late or "strategy 1 of 2 is not tried" in first["said"]
    assert "2 of 2 is not tried" in first["said"]
    assert first["left"] == second["left"] == [0, 1]


@pytest.mark.parametrize(
    ("target", "memory"),
    [
        ("train", {}),
        ("train", {"device": "1500KiB", "host": "64MiB"}),
        pytest.param("train_by_itself", {}, marks=pytest.mark.matrix),
    ],
)
def test_a_run_after_a_trial_is_the_run_without_one(
    tmp_path: Path, target: str, memory: dict[str, str]
) -> None:
    machine(2).dump(tmp_path / "cluster.yaml")
    data = {**SMALL_RUN["data"], "cache": str(tmp_path)}
    sections = {**SMALL_RUN, "data": data, "train": {"batch": 4, "steps": 2}}
    open_ = {
        "axes": {"replicate": "auto", "shard": "auto"},
        "memory": {"recompute": "none", **memory},
        "cluster": str(tmp_path / "cluster.yaml"),
        "tries": 2,
    }
    config = run_file(tmp_path, open_, **sections)
    assert launched(config, target) == 0
    assert "that were tried, it took the least" in (tmp_path / "run" / STRATEGY_FILE).read_text()
    first, second = (noted(tmp_path, rank) for rank in range(2))
    assert first["laid"] == second["laid"] and first["losses"] == second["losses"]
    assert first["left"] == second["left"] == [0, 1]

    sections["train"] = {**sections["train"], "micro_batch": first["micro"]}
    plain = run_file(tmp_path / "plain", first["laid"], **sections)
    assert launched(plain, "train") == 0
    assert noted(tmp_path / "plain", 0)["losses"] == first["losses"]
