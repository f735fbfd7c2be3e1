"""`roles.actor.profile` writes a trace of each of the actor's workers, and the run is the one without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.run import run, summary_lines

ROLES: dict[str, Any] = {
    "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}, "profile": {"steps": 1}},
    "rollout": {"devices": 2, "page": 16},
}


def test_each_worker_traces_the_updates_of_a_step(tmp_path: Path) -> None:
    config = rl_config(
        tmp_path / "run", roles=ROLES, rl={"minibatches": 2, "objective": "decoupled"}, eval={"prompts": 2}
    )
    expected = expected_weights(config)
    summary = run(config)
    folder = tmp_path / "run/profile"
    assert summary.profile == str(folder)
    assert f"traces: {folder}, one for each of the actor's workers" in "\n".join(summary_lines(summary))
    for rank in range(2):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        ranges = sorted(
            (one for one in events if one.get("cat") == "user_annotation"), key=lambda one: one["ts"]
        )
        names = [one["name"] for one in ranges if one["name"].startswith(("step", "update", "log-prob"))]
        assert names == ["step 3", "log-probabilities", "update 5", "update 6"]
        [last] = [one for one in ranges if one["name"] == "update 6"]
        inside = [
            one["name"]
            for one in events
            if one.get("cat") == "cpu_op" and last["ts"] <= one["ts"] <= last["ts"] + last["dur"]
        ]
        assert any("mm" in name for name in inside)
        assert any("Backward" in name for name in inside)
        assert any("reduce_scatter" in name for name in inside)
    assert summary.checkpoint is not None
    found = saved_weights(summary.checkpoint)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_traces_are_the_actors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compares a step of `train` with its prediction"):
        rl_config(tmp_path, roles={"actor": {"profile": {"cluster": "h100"}}})
    with pytest.raises(ConfigError, match=r"roles\.actor\.profile"):
        rl_config(tmp_path, rl={"profile": {"steps": 1}})
