"""`roles.actor.profile` writes a trace of each of the actor's workers, and the updates are those without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_runs import rl_config, samples_of, whole_weights
from hyper_parallel.compat import backend
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.worker import Worker
from hyper_parallel.rl.controller.workers import groups_of, launch_of
from hyper_parallel.rl.roles.host import RoleHost
from hyper_parallel.rl.run import RLSummary, summary_lines


def config_of(out: Path, **actor: Any) -> RLConfig:
    roles = {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}, **actor},
        "rollout": {"devices": 2, "page": 16},
    }
    return rl_config(out, roles=roles, rl={"minibatches": 2, "objective": "decoupled"})


def trained(rank: int, world: int, out: Path, actor: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after three steps."""
    config = config_of(out, **actor)
    worker = Worker(rank, rank, world, world, torch.device("cpu"), backend("cpu"))
    host = RoleHost(launch_of(config, groups_of(config)[0], 3), worker)
    for seed in range(3):
        host.train(samples_of(config, seed), None)
    return whole_weights(host._model("actor"))


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_each_worker_traces_the_updates_of_a_step(tmp_path: Path, engine: str) -> None:
    profiled = {"engine": engine, "profile": {"steps": 1}}
    found, *_ = run_ranks(trained, 2, tmp_path / "traced", profiled, timeout=280)
    for rank in range(2):
        trace = json.loads((tmp_path / f"traced/profile/rank-{rank}.json").read_text())
        events = trace["traceEvents"]
        ranges = [one for one in events if one.get("cat") == "user_annotation"]
        ranges.sort(key=lambda one: one["ts"])
        names = [one["name"] for one in ranges if one["name"].startswith(("step", "update", "log-prob"))]
        assert names == ["step 3", "log-probabilities", "update 5", "update 6"]
        [last] = [one for one in ranges if one["name"] == "update 6"]
        inside = [
            one["name"]
            for one in events
            if one.get("cat") == "cpu_op" and last["ts"] <= one["ts"] <= last["ts"] + last["dur"]
        ]
        assert any("mm" in name for name in inside)
        assert any("reduce_scatter" in name for name in inside)
    plain, *_ = run_ranks(trained, 2, tmp_path / "plain", {"engine": engine}, timeout=280)
    assert not (tmp_path / "plain/profile").exists()
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_a_run_names_its_traces() -> None:
    lines = summary_lines(RLSummary(out="run", stopped=False, profile="run/profile"))
    assert any(line.startswith("traces: run/profile, one for each") for line in lines)


def test_traces_are_the_actors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compares a step of `train` with its prediction"):
        config_of(tmp_path, profile={"cluster": "h100"})
    with pytest.raises(ConfigError, match=r"it is the actor's: roles\.actor\.profile"):
        rl_config(tmp_path, rl={"profile": {"steps": 1}})
    with pytest.raises(ConfigError, match="updates are traced"):
        rl_config(tmp_path, rl={"kl": 0.1}, roles={"reference": {"profile": {"steps": 1}}})
