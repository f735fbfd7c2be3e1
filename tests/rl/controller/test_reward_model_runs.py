"""Runs whose rewards are a model's scores: on the actor's devices and on its own, with and without faults."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.reward_folders import reward_folder
from harness.rl_faults import faulted, left_behind
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.errors import ConfigError, UnsupportedModelError
from hyper_parallel.rl.controller.run import run

APART = {"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}}
PLACES: dict[str, dict[str, Any]] = {
    "colocated": {},
    "its own devices": {**APART, "reward": {"devices": 2}},
    "with the actor, two ranks": {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
        "rollout": {"devices": 2, "page": 16},
    },
}


def reward_config(tmp_path: Path, folder: Path, **sections: Any) -> RLConfig:
    roles = dict(sections.pop("roles", {}))
    roles["reward"] = {"model": str(folder), **roles.get("reward", {})}
    return rl_config(
        tmp_path / "run", task={"reward": "model", **sections.pop("task", {})}, roles=roles, **sections
    )


def records(config: RLConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]


def equal_weights(checkpoint: str | None, config: RLConfig) -> None:
    assert checkpoint is not None
    found = saved_weights(checkpoint)
    for name, value in expected_weights(config).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("place", PLACES)
def test_bit_for_bit_the_plain_loop(place: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores")
    config = reward_config(tmp_path, folder, roles=PLACES[place])
    summary = run(config)
    assert summary.steps == 3
    assert summary.failed_rewards == 0
    equal_weights(summary.checkpoint, config)
    assert not left_behind()


@pytest.mark.parametrize("staleness", [0, 1])
def test_rewards_rise(staleness: int, tmp_path: Path) -> None:
    """Of a model that gives 4 · √2 to answers that end with a 7, and nothing to others."""
    folder = reward_folder(tmp_path / "scores", prefers="7")
    roles = PLACES["its own devices"] if staleness else {}
    rl = {
        "steps": 30,
        "prompts": 8,
        "group": 8,
        "max_tokens": 3,
        "staleness": staleness,
        "optimizer": {"name": "adamw", "lr": 5e-3},
    }
    config = reward_config(tmp_path, folder, roles=roles, rl=rl)
    summary = run(config)
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        expected = 4 * math.sqrt(2) * (sample["prompt"] + sample["answer"]).endswith("7")
        assert sample["reward"] == pytest.approx(expected, abs=1e-3)
    assert summary.before is not None
    assert summary.after is not None
    assert summary.before.sampled < 2
    assert summary.after.sampled > 4
    steps = [one for one in records(config) if "reward" in one]
    assert steps[-1]["reward"] > 4
    if staleness:
        assert all("busy_reward" in one for one in steps)


def test_killed_reward_workers(tmp_path: Path) -> None:
    """They cost no answer: the weights are those of a run without faults."""
    folder = reward_folder(tmp_path / "scores")
    config = reward_config(tmp_path, folder, roles=PLACES["its own devices"], rl={"steps": 30})
    summary, done, lines = faulted(config, 2, "reward", (signal.SIGKILL,), (0.05, 0.4))
    assert done
    assert summary.restarts >= 1
    assert any("starting reward again" in line for line in lines)
    assert summary.failed_rewards == 0
    equal_weights(summary.checkpoint, config)


def test_answers_that_are_too_long_have_no_reward(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores")
    config = reward_config(tmp_path, folder, roles={"reward": {"max_length": 7}})
    summary = run(config)
    assert summary.steps == 3
    # "123=" and an answer of 4 tokens.
    assert summary.failed_rewards > 0


def test_a_head_of_two_labels(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores", num_labels=2)
    with pytest.raises(UnsupportedModelError, match=r"2 labels.*num_labels=1") as caught:
        run(reward_config(tmp_path, folder, roles=PLACES["its own devices"]))
    assert "\n" not in str(caught.value)
    assert not left_behind()


ROLE = {"model": "scores"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"reward": "model"}}, r"roles\.reward"),
        ({"roles": {"reward": ROLE}}, r"task\.reward"),
        (
            {"task": {"reward": "exact_match", "environment": "calculator"}, "roles": {"reward": ROLE}},
            r"task\.environment",
        ),
        (
            {"task": {"reward": "model"}, "roles": {"reward": ROLE}, "warmup": {"until": 0.5}},
            r"warmup\.until",
        ),
        ({"task": {"reward": "model", "time_limit": 3}, "roles": {"reward": ROLE}}, "'time_limit'"),
        ({"task": {"reward": "model", "options": {"a": 1}}, "roles": {"reward": ROLE}}, "'options'"),
        (
            {
                "task": {"reward": "model"},
                "roles": {
                    "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
                    "reward": {**ROLE, "devices": "1-2"},
                },
            },
            "'reward' and 'actor' share",
        ),
        (
            {"task": {"reward": "model"}, "roles": {**APART, "reward": {**ROLE, "devices": 1}}},
            "'reward' and 'rollout' share",
        ),
        (
            {
                "task": {"reward": "model"},
                "roles": {**APART, "reward": {**ROLE, "strategy": {"axes": {"tensor": 2}}}},
            },
            "'reward' has 1 devices",
        ),
        (
            {
                "task": {"reward": "model"},
                "roles": {**APART, "reward": {**ROLE, "strategy": {"axes": {"pipeline": 2}}}},
            },
            "reward model runs under",
        ),
    ],
)
def test_mistakes_are_one_line(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rl_config(tmp_path / "run", **sections)
    assert "\n" not in str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    def axes(**roles: Any) -> Any:
        found = reward_config(tmp_path, tmp_path, roles=roles).roles.rewards
        assert found is not None
        return found.spread.axes

    actor = {"devices": "0-1", "strategy": {"axes": {"shard": 2}}}
    assert axes(actor=actor).shard == 2
    assert axes(actor=actor, reward={"devices": "2-4"}).replicate == 3
