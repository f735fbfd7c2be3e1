"""After a run that failed: which steps are lost, and from which checkpoint the next start goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel.checkpoint import Writer
from hyper_parallel.checkpoint.verify import pass_over
from hyper_parallel.launch.worker_failure import watch_steps


def record(out: Path, *steps: int) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in steps] + [
        json.dumps({"step": 1, "eval_loss": 1.0})
    ]
    (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"step": 99, "lo')


def save(out: Path, *steps: int) -> None:
    with Writer(out / "checkpoints", 1, 0, keep=9) as writer:
        for step in steps:
            writer.save(step, {}, {})


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (
            9,
            "lost: the 2 steps since {}/checkpoints/step-00000007, the newest checkpoint; step 9 was ",
        ),
        (8, "lost: the step since {}/checkpoints/step-00000007, "),
        (7, None),
    ],
)
def test_the_steps_since_the_newest_checkpoint_are_lost(done: int, said: str | None, tmp_path: Path) -> None:
    save(tmp_path, 3, 7)
    lost = watch_steps(tmp_path)
    record(tmp_path, *range(1, done + 1))
    line = lost()
    assert line is None if said is None else line is not None and said.format(tmp_path) in line


def test_without_a_checkpoint_all_steps_are_lost(tmp_path: Path) -> None:
    lost = watch_steps(tmp_path)
    record(tmp_path, 1, 2)
    assert "lost: all 2 steps, since there is no checkpoint" in str(lost())


def test_one_that_will_be_passed_over_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 3, 7)
    pass_over(tmp_path / "checkpoints" / "step-00000007", "ruined")
    lost = watch_steps(tmp_path)
    record(tmp_path, 8)
    assert "the 5 steps since" in str(lost())


def test_what_an_earlier_run_lost_is_not_this_ones(tmp_path: Path) -> None:
    record(tmp_path, 1, 2)
    assert watch_steps(tmp_path)() is None
