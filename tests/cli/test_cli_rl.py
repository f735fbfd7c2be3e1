"""`hyper-parallel rl`, as a person types it: the example, its trained policy, mistakes, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.forked_command import CommandProcess, run_command
from hyper_parallel.cli.main import command as command_line
from hyper_parallel.rl import role_split

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "grpo-sort.yaml"
SMALL = (
    "rl.steps=3",
    "rl.prompts=4",
    "warmup.steps=4",
    "warmup.batch=8",
    "eval.prompts=8",
    "roles.rollout.batch=16",
    "trackers=[]",
)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, folder=folder)


def test_the_example_and_its_policy(tmp_path: Path) -> None:
    found = command(tmp_path, "rl", str(EXAMPLE), *SMALL)
    assert found.returncode == 0, found.stderr
    assert "step    3/3   reward" in found.stdout
    assert "held-out reward, sampled:" in found.stdout
    assert found.stdout.splitlines()[-1] == 'next: hyper-parallel generate runs/grpo-sort --prompt "..."'
    assert found.stderr == ""
    again = command(tmp_path, "rl", str(EXAMPLE), *SMALL, "rl.steps=4")
    assert "resumed at step 3" in again.stdout, again.stderr
    answer = command(tmp_path, "generate", "runs/grpo-sort", "--prompt", "53142=", "inference.max_tokens=6")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip().strip("0123456789=") == ""


def test_a_plan(tmp_path: Path) -> None:
    """With one device there is one layout, and nothing to measure."""
    found = command(tmp_path, "rl", str(EXAMPLE), *SMALL, "roles=auto", "roles.devices=1", "--plan")
    assert found.returncode == 0, found.stderr
    first, last = found.stdout.splitlines()
    assert first.startswith("roles: 1 device trains and generates in turn")
    assert last.startswith("kept for the run: runs/grpo-sort/split.json")
    assert (tmp_path / "runs" / "grpo-sort" / "run.yaml").is_file()
    refused = command(tmp_path, "rl", str(EXAMPLE), "--plan")
    assert refused.returncode == 2
    assert "add roles=auto to have them chosen" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_ctrl_c_ends_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise role_split.Stopped

    monkeypatch.setattr(role_split, "plan_split", stopped)
    ended = CliRunner().invoke(command_line, ["rl", str(EXAMPLE), f"out={tmp_path}", "roles=auto", "--plan"])
    assert ended.exit_code == 130, ended.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.stalenes=1", "staleness"),
        ("task.reward=exact", "exact_match"),
        ("roles.rollout.devices=0-1", "share some of their devices"),
        ("rl.algorithm=gpro", "grpo"),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str, tmp_path: Path) -> None:
    found = command(tmp_path, "rl", str(EXAMPLE), override)
    assert found.returncode == 2
    assert message in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_ctrl_c_saves(tmp_path: Path) -> None:
    arguments = ["rl", str(EXAMPLE), *SMALL, "rl.steps=100000"]
    with CommandProcess(arguments, tmp_path, together=True) as process:
        file = tmp_path / "runs" / "grpo-sort" / "metrics.jsonl"
        ends = time.monotonic() + 200
        while time.monotonic() < ends and not (file.exists() and '"reward"' in file.read_text()):
            assert process.poll() is None, process.output()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(60)
        [told] = process.output()
    assert code == 130, told
    assert "stopping: the step under way ends and is saved" in told
    assert told.splitlines()[-1].startswith("stopped; run the same command again")
    assert list((tmp_path / "runs" / "grpo-sort" / "checkpoints").iterdir())
