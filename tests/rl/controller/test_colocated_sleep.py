"""A colocated run whose roles sleep has the bits of one whose roles stay, through checkpoints and when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.rl_faults import left_behind
from harness.rl_runs import rl_config, saved_tensors
from hyper_parallel.errors import TierError
from hyper_parallel.rl.controller.run import run

COPIES = {
    "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
    "rollout": {"devices": "0-1", "strategy": {"axes": {"replicate": 2}}, "page": 16},
}
KINDS: dict[str, dict[str, Any]] = {
    "one model": {
        "rl": {"kl": 0.1, "algorithm": "ppo", "minibatches": 2},
        "warmup": {"steps": 2, "batch": 8},
    },
    "own copies": {"rl": {"kl": 0.1}, "roles": COPIES},
}


def records(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [one for one in found if "reward" in one]


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind]
    stays = run(rl_config(tmp_path / "stays", **given))
    roles = {
        **given.get("roles", {"rollout": {"page": 16}}),
        "sleep": {"host": 30000, "flash": str(tmp_path / "flash")},
    }
    config = rl_config(tmp_path / "sleeps", **{**given, "roles": roles, "checkpoint": {"every": 1}})

    def stop() -> bool:
        return (
            len(records(tmp_path / "sleeps")) > 0
            if (tmp_path / "sleeps" / "metrics.jsonl").exists()
            else False
        )

    first = run(config, stop=stop)
    assert first.stopped
    sleeps = run(config)
    assert sleeps.resumed_from == first.steps
    assert sleeps.checkpoint is not None
    assert stays.checkpoint is not None
    found, expected = saved_tensors(sleeps.checkpoint), saved_tensors(stays.checkpoint)
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for one, other in zip(records(tmp_path / "sleeps"), records(tmp_path / "stays"), strict=True):
        assert one["offloaded_bytes"] > 0
        for turn in ("generate", "score", "train"):
            assert one[f"resident_bytes_{turn}"] < other[f"resident_bytes_{turn}"]
    assert not left_behind()
    assert not list((tmp_path / "flash").iterdir())


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
