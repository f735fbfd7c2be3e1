"""A colocated run whose roles sleep has the bits of one whose roles stay: through checkpoints, when it goes on, and
when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_faults import WatchedEngine, left_behind
from harness.rl_runs import rl_config, saved_tensors
from hyper_parallel.errors import TierError
from hyper_parallel.rl.run import run

STAYS = 30000
"""Bytes of the host tier; the rest goes to files."""


def records(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [one for one in found if "reward" in one]


def compare(tmp_path: Path, checkpoint: str | None, expected: str | None) -> None:
    """All tensors of two checkpoints; and the sleeping run's metrics, of which less is on the device in each turn."""
    assert checkpoint is not None
    assert expected is not None
    found, other = saved_tensors(checkpoint), saved_tensors(expected)
    assert found.keys() == other.keys()
    assert any(name.startswith("optimizer.") for name in other)
    for name, value in other.items():
        assert torch.equal(found[name], value), name
    for one, stays in zip(records(tmp_path / "sleeps"), records(tmp_path / "stays"), strict=True):
        assert one["offloaded_bytes"] > 0
        for turn in ("generate", "score", "train"):
            assert one[f"resident_bytes_{turn}"] < stays[f"resident_bytes_{turn}"]
    assert not left_behind()
    assert not list((tmp_path / "flash").iterdir())


def test_one_model_that_goes_on(tmp_path: Path) -> None:
    """PPO with critic and reference after a warm-up; the rollout generates with the actor's weights, in a budget."""
    given: dict[str, Any] = {
        "rl": {"kl": 0.1, "algorithm": "ppo", "minibatches": 2},
        "warmup": {"steps": 2, "batch": 8},
    }
    stays = run(rl_config(tmp_path / "stays", **given))
    roles = {
        "rollout": {"page": 16, "strategy": {"memory": {"device": "4MiB"}}},
        "sleep": {"host": STAYS, "flash": str(tmp_path / "flash")},
    }
    config = rl_config(tmp_path / "sleeps", **given, roles=roles, checkpoint={"every": 1})
    first = run(config, stop=lambda: len(records(tmp_path / "sleeps")) > 0)
    assert first.stopped
    sleeps = run(config)
    assert sleeps.resumed_from == first.steps
    assert sleeps.before == stays.before
    assert sleeps.after == stays.after
    compare(tmp_path, sleeps.checkpoint, stays.checkpoint)


def test_own_copies_and_a_killed_worker(tmp_path: Path) -> None:
    """The rollouts have their own weights, which are exchanged."""
    given: dict[str, Any] = {"rl": {"kl": 0.1}}
    roles = {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
        "rollout": {"devices": "0-1", "strategy": {"axes": {"replicate": 2}}, "page": 16},
    }
    stays = run(rl_config(tmp_path / "stays", **given, roles=roles))
    sleep = {"host": STAYS, "flash": str(tmp_path / "flash")}
    config = rl_config(tmp_path / "sleeps", **given, roles={**roles, "sleep": sleep}, checkpoint={"every": 1})
    engine = WatchedEngine()
    killed = []

    def told(line: str) -> None:
        if line.startswith("step    2/3") and not killed:
            killed.append(engine.groups[0].pids[1])
            os.kill(killed[0], signal.SIGKILL)

    sleeps = run(config, engine=lambda: engine, told=told)
    assert killed
    assert sleeps.restarts == 1
    compare(tmp_path, sleeps.checkpoint, stays.checkpoint)


def test_asynchronous(tmp_path: Path) -> None:
    """Answers are under way when the KV cache goes."""
    roles = {"rollout": {"page": 16}, "sleep": {"flash": str(tmp_path / "flash")}}
    config = rl_config(tmp_path / "run", rl={"staleness": 2, "chunk": 1, "order": "window"}, roles=roles)
    assert run(config).steps == 3
    assert any(one["staleness_max"] > 0 for one in records(tmp_path / "run"))


def test_no_room_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"raise roles\.sleep\.host") as caught:
        run(rl_config(tmp_path / "run", roles={"sleep": {"host": 40000}}, rl={"kl": 0.1}))
    assert "\n" not in str(caught.value)
    assert not left_behind()
