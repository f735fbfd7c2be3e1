"""Every process of a run is killed at once: the same command goes on, with the weights of a run without faults."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.commands import descendants, running, wait_until
from harness.forked_command import CommandProcess, run_command
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.config import yaml12


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_same_command_goes_on(sleeps: bool, tmp_path: Path) -> None:
    roles: dict[str, Any] = {"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}}
    if sleeps:
        roles = {"sleep": {"flash": str(tmp_path / "flash")}, "rollout": {"page": 16}}
    config = rl_config(tmp_path / "run", rl={"steps": 14}, roles=roles, checkpoint={"every": 5, "keep": 2})
    file = tmp_path / "run.yaml"
    file.write_text(yaml12.write(config.model_dump(mode="json")))

    metrics = tmp_path / "run" / "metrics.jsonl"
    with CommandProcess(["rl", str(file)], tmp_path) as process:
        wait_until(lambda: metrics.exists() and '"step": 8' in metrics.read_text(), "step 8", 200)
        assert process.poll() is None
        family = [*descendants(process.pid), process.pid]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: not any(map(running, family)), "the end of all processes")

    again = run_command("rl", str(file), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumed at step " in again.stdout
    found = saved_weights(str(tmp_path / "run" / "checkpoints" / "step-00000014"))
    for name, value in expected_weights(config).items():
        assert torch.equal(found[name], value), name
    assert not sleeps or not list((tmp_path / "flash").iterdir())
