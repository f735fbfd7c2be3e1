"""Runs whose rewards are a model's scores: on the actor's devices and on its own, with and without faults."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.chat_model import CHATS, write_model
from harness.chat_model import tokenizer as chat_tokenizer
from harness.reward_folders import plain_scores, reward_folder
from harness.rl_faults import faulted, left_behind
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError, RewardError, UnsupportedModelError
from hyper_parallel.rl.run import run

APART = {"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}}
PLACES: dict[str, dict[str, Any]] = {
    "actor and rollout": {},
    "actor, two ranks": {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
        "rollout": {"devices": 2, "page": 16},
    },
}
"""Whose devices the reward model has; its own in `test_killed_workers`."""


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
    roles = {**APART, "reward": {"devices": 2}} if staleness else {}
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


@pytest.mark.parametrize(("group", "place"), [("reward", {"devices": 2}), ("actor", {})])
def test_killed_workers(group: str, place: dict[str, Any], tmp_path: Path) -> None:
    """The weights are those of a run without faults; a reward model's workers cost no answer.

    Killed rollouts: tests/rl/controller/test_lost_workers.py.
    """
    folder = reward_folder(tmp_path / "scores")
    roles = {**APART, "reward": place}
    config = reward_config(tmp_path, folder, roles=roles, rl={"steps": 20}, checkpoint={"every": 5})
    summary, done, lines = faulted(config, 2, group, (signal.SIGKILL,), (0.05, 0.4))
    assert done
    assert summary.restarts >= 1
    assert any(f"starting {group}" in line for line in lines)
    assert summary.failed_rewards == 0
    equal_weights(summary.checkpoint, config)


def test_conversations(tmp_path: Path) -> None:
    """Through the reward model's own chat template, whatever that of the policy."""
    policy = write_model(tmp_path / "policy")
    folder = tmp_path / "scores"
    words = chat_tokenizer(
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    reward_folder(folder, vocab_size=len(words), max_position_embeddings=256)
    words.save_pretrained(folder)
    chats = [[{"role": "user", "content": asked}] for asked, _ in CHATS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in chats))
    base = rl_config(tmp_path / "run").model_dump(mode="json")
    config = RLConfig.model_validate(
        {
            **base,
            "model": {"path": str(policy)},
            "task": {"prompts": str(tmp_path / "prompts.jsonl"), "reward": "model"},
            "rl": {**base["rl"], "steps": 1, "max_tokens": 8},
            "roles": {"rollout": {"page": 16}, "reward": {"model": str(folder)}},
        }
    )
    assert run(config).steps == 1
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        one = json.loads(line)
        said = [*one["prompt"], {"role": "assistant", "content": one["answer"]}]
        ids = words.apply_chat_template(said, tokenize=True, return_dict=True)["input_ids"]
        assert one["reward"] == pytest.approx(plain_scores(folder, [ids])[0], abs=1e-5)


def test_answers_that_are_too_long_have_no_reward(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores")
    own = {"devices": "2-3", "strategy": {"axes": {"tensor": 2}}, "max_length": 10}
    config = reward_config(
        tmp_path,
        folder,
        roles={**APART, "reward": own},
        task={"max_failed": 0.99},
        rl={"max_tokens": 16},
    )
    summary = run(config)
    assert summary.steps == 3
    # "123=" and an answer of 7 tokens or more.
    assert summary.failed_rewards > 0


def test_answers_that_are_all_too_long_end_the_run(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores")
    own = {"devices": "2-3", "strategy": {"axes": {"tensor": 2}}, "max_length": 4}
    with pytest.raises(
        RewardError, match=r"max_length, or its score is not finite; raise roles.reward.max_length"
    ):
        run(reward_config(tmp_path, folder, roles={**APART, "reward": own}))


def test_a_head_of_two_labels(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "scores", num_labels=2)
    with pytest.raises(UnsupportedModelError, match=r"2 labels.*num_labels=1") as caught:
        run(reward_config(tmp_path, folder, roles={**APART, "reward": {"devices": 2}}))
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
