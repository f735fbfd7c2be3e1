"""Reinforcement learning on Ray: the run of the local engine, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_runs import rl_config, saved_weights
from hyper_parallel.rl.run import run

pytestmark = pytest.mark.timeout(900)


def test_a_run_has_the_weights_of_the_local_engine(tmp_path: Path) -> None:
    found = {}
    for engine in ("local", "ray"):
        roles: dict[str, Any] = {
            "actor": {"devices": 0},
            "rollout": {"devices": 1, "page": 16},
            "engine": engine,
        }
        summary = run(rl_config(tmp_path / engine, roles=roles, launch={"timeout": 300}))
        assert summary.checkpoint is not None
        found[engine] = saved_weights(summary.checkpoint)
    for name, value in found["local"].items():
        assert torch.equal(found["ray"][name], value), name
