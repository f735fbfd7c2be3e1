"""A synchronous run with groups of workers, a queue and weight transfers is the plain loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.rl.run import run

CASES = [
    ({"shard": 2}, {}, "2"),
    ({"tensor": 2}, {"tensor": 2}, "2-3"),
    *(
        pytest.param(actor, rollout, devices, marks=pytest.mark.matrix)
        for actor, rollout, devices in (
            ({"shard": 2}, {"tensor": 2}, "2-3"),
            ({"shard": 2}, {"replicate": 2}, "2-3"),
            ({"tensor": 2}, {}, "2"),
            ({"tensor": 2}, {"replicate": 2}, "2-3"),
        )
    ),
]


@pytest.mark.parametrize(("actor", "rollout", "devices"), CASES, ids=str)
def test_bit_for_bit(actor: dict[str, int], rollout: dict[str, int], devices: str, tmp_path: Path) -> None:
    roles: dict[str, Any] = {
        "actor": {"devices": "0-1", "strategy": {"axes": actor}},
        "rollout": {"devices": devices, "page": 16, "strategy": {"axes": rollout}},
    }
    config = rl_config(tmp_path / "run", roles=roles)
    expected = expected_weights(config)
    summary = run(config)
    assert summary.steps == 3
    assert summary.checkpoint is not None
    found = saved_weights(summary.checkpoint)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_changes_alone_are_exact(tmp_path: Path) -> None:
    """Weights that travel as differences are those that travel whole; rounded ones are not."""
    found = {}
    for name, weights in (("whole", {}), ("delta", {"delta": True}), ("rounded", {"dtype": "bfloat16"})):
        roles = {
            "actor": {"devices": 0},
            "rollout": {"devices": 1, "page": 16},
            "weights": weights,
        }
        summary = run(rl_config(tmp_path / name, roles=roles))
        assert summary.checkpoint is not None
        found[name] = saved_weights(summary.checkpoint)
    for name, value in found["whole"].items():
        assert torch.equal(found["delta"][name], value), name
    assert any(not torch.equal(found["rounded"][name], value) for name, value in found["whole"].items())
