"""The strategy in a run's folder, and when a resumed run keeps to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from auto_cases import run_file

from hyper_parallel import config as files
from hyper_parallel.planner.auto.entry import STRATEGY_FILE, saved_choice, write_choice

LAID = {
    "train": {"micro_batch": 2},
    "strategy": {"axes": {"shard": 2, "tensor_x": 2}, "memory": {"shard": "gradients"}},
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run that chose, and saved."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_choice(folder, LAID, ["chosen so"])
    return folder


def test_a_resumed_run_keeps_what_was_chosen(tmp_path: Path, out: Path) -> None:
    laid, said = saved_choice(run_file(tmp_path), 4)
    assert laid == LAID and "resumes" in said


def test_a_file_may_build_on_it(tmp_path: Path, out: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"extends: {out / STRATEGY_FILE}\nversion: 1\nout: x\n"
        "model: {config: {model_type: llama}}\ndata: {train: a}\n"
    )
    assert files.load(tmp_path / "mine.yaml").strategy.axes.tensor_x == 2
    assert (out / STRATEGY_FILE).read_text().startswith("# chosen so\n")


def test_without_a_checkpoint_nothing_is_kept(tmp_path: Path, out: Path) -> None:
    (out / "checkpoints" / "step-00000001").rmdir()
    assert saved_choice(run_file(tmp_path), 4) == (None, "")


@pytest.mark.parametrize(
    ("world", "strategy", "said"),
    [
        (8, "auto", "is for 4 workers and there are 8"),
        (4, {"axes": {"shard": "auto", "tensor": 4}}, "not what the run file writes now"),
    ],
)
def test_what_has_changed_is_planned_anew(
    tmp_path: Path, out: Path, world: int, strategy: object, said: str
) -> None:
    laid, told = saved_choice(run_file(tmp_path, strategy), world)
    assert laid is None and said in told and "planned anew" in told


def test_a_broken_file_is_planned_anew(tmp_path: Path, out: Path) -> None:
    (out / STRATEGY_FILE).write_text("version: 1\n")
    laid, told = saved_choice(run_file(tmp_path), 4)
    assert laid is None and "planned anew" in told
