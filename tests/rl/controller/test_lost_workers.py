"""Workers that are killed in the middle of a synchronous run change nothing in its weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_faults import WatchedEngine, faults
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.errors import GroupError
from hyper_parallel.rl.controller.run import RLSummary, run


def faulted(config: Any, count: int, groups: str, kinds: tuple[int, ...]) -> tuple[RLSummary, list[str]]:
    engines: list[WatchedEngine] = []

    def engine() -> WatchedEngine:
        engines.append(WatchedEngine())
        return engines[-1]

    lines: list[str] = []
    begun = lambda: any("held out" in line for line in lines)  # noqa: E731
    with faults(engines, count, 1, (0.1, 0.6), kinds, begun, groups) as done:
        return run(config, engine=engine, told=lines.append), done


@pytest.mark.parametrize("group", ["rollout", "actor"])
def test_a_killed_group(group: str, tmp_path: Path) -> None:
    config = rl_config(
        tmp_path / "run",
        rl={"steps": 40},
        roles={"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}},
        checkpoint={"every": 5},
    )
    summary, done = faulted(config, 2, group, (signal.SIGKILL,))
    assert done
    assert summary.restarts >= 1
    assert summary.checkpoint is not None
    found = saved_weights(summary.checkpoint)
    for name, value in expected_weights(config).items():
        assert torch.equal(found[name], value), name


def test_a_group_that_is_lost_too_often(tmp_path: Path) -> None:
    config = rl_config(
        tmp_path / "run",
        rl={"steps": 200},
        roles={"rollout": {"devices": 1, "page": 16}, "restarts": 0},
    )
    with pytest.raises(GroupError, match=r"roles\.restarts"):
        faulted(config, 5, "rollout", (signal.SIGKILL,))
