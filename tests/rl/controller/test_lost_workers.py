"""Workers that are killed in the middle of a synchronous run change nothing in its weights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from harness.rl_faults import faulted
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.errors import GroupError


@pytest.mark.parametrize("group", ["rollout", "actor"])
def test_a_killed_group(group: str, tmp_path: Path) -> None:
    config = rl_config(
        tmp_path / "run",
        rl={"steps": 40},
        roles={"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}},
        checkpoint={"every": 5},
    )
    summary, done, _ = faulted(config, 2, group, (signal.SIGKILL,))
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
