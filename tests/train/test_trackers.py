"""Metrics files: what is written, what a resume removes, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hyper_parallel.errors import CheckpointError, ConfigError
from hyper_parallel.train.trackers import RunInfo, Trackers, build_trackers, register_tracker


def _run(out: Path, start: int, stop: int, names: list[str] | None = None) -> None:
    trackers = build_trackers(names or [], RunInfo(out, {"seed": 1}, start))
    for step in range(start + 1, stop + 1):
        trackers.log(step, {"loss": float(100 * start + step), "grad_norm": float("inf")})
    trackers.text(stop, "sample", "def f():\n    pass")
    trackers.close()


def _records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_metrics_file_has_a_line_a_step(tmp_path: Path) -> None:
    _run(tmp_path, 0, 3)
    *steps, sample = _records(tmp_path)
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert steps[0] == {"step": 1, "loss": 1.0, "grad_norm": None}
    assert sample == {"step": 3, "sample": "def f():\n    pass"}


def test_a_resume_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    _run(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a crash in the middle of a line
    _run(tmp_path, 3, 6)
    steps = [r for r in _records(tmp_path) if "loss" in r]
    assert [(r["step"], r["loss"]) for r in steps] == [(1, 1), (2, 2), (3, 3), (4, 304), (5, 305), (6, 306)]
    assert sum("sample" in r for r in _records(tmp_path)) == 1


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\x00rest\n", b"7\n", b"[1]\n", b'{"loss": 1}\n', b'{"step": "3"}\n', b"[" * 100_000 + b"\n"],
)
def test_a_line_that_is_no_record_is_skipped_and_gone(line: bytes, tmp_path: Path) -> None:
    _run(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line)
    _run(tmp_path, 2, 3)
    assert [r["step"] for r in _records(tmp_path) if "loss" in r] == [1, 2, 3]


def test_a_pipe_in_the_files_place_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(
        CheckpointError, match=r"cannot read .*metrics.jsonl: it is a pipe, and a file is needed"
    ):
        _run(tmp_path, 1, 2)


def test_a_run_whose_folder_is_removed_ends_at_the_next_record(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    trackers = build_trackers([], RunInfo(tmp_path / "out", {}, 0))
    trackers.log(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(CheckpointError, match="its folder was removed while it was in use"):
        trackers.log(2, {"loss": 1.0})


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    _run(tmp_path, 0, 5)
    _run(tmp_path, 0, 2)
    assert [r["step"] for r in _records(tmp_path) if "loss" in r] == [1, 2]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    _run(tmp_path, 0, 5, ["tensorboard"])
    _run(tmp_path, 3, 6, ["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1), (2, 2), (3, 3), (4, 304), (5, 305), (6, 306)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ConfigError, match=rf"pip install 'hyper-parallel\[{name}\]'"):
        build_trackers([name], RunInfo(tmp_path, {}, 0))


def test_an_unknown_tracker_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        build_trackers(["tensorbord"], RunInfo(tmp_path, {}, 0))


def test_a_registered_tracker_gets_everything(tmp_path: Path) -> None:
    seen: list[object] = []

    class Mine:
        def __init__(self, run: RunInfo) -> None:
            seen.append(run.config)

        def log(self, step: int, record: dict[str, float]) -> None:
            seen.append((step, dict(record)))

        def text(self, step: int, name: str, text: str) -> None:
            seen.append((step, name, text))

        def close(self) -> None:
            seen.append("closed")

    register_tracker("mine", Mine)
    trackers = build_trackers(["mine"], RunInfo(tmp_path, {"seed": 3}, 0))
    assert isinstance(trackers, Trackers)
    trackers.log(1, {"loss": 2.0})
    trackers.text(1, "sample", "x")
    trackers.close()
    assert seen == [{"seed": 3}, (1, {"loss": 2.0}), (1, "sample", "x"), "closed"]
