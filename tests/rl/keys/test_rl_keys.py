"""Every key of a reinforcement-learning file is read on the way of its command, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.key_reads import RL_ROOTS, InlineEngine, ignored_keys, key_reads
from harness.ranks import run_ranks
from harness.reward_folders import reward_folder
from harness.rl_runs import rl_config, samples_of
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.controller.workers import engine_of
from hyper_parallel.rl.role_layouts import device_count
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import rollout_model, tokenizer_of, trained_policy
from hyper_parallel.rl.run import run

OPTIMIZERS = ("adamw", "muon", "adamw_8bit", "lion", "adafactor")
ELSEWHERE = {
    "version": "of the format: the loader has it",
    **{f"roles.{role}.strategy.version": "likewise" for role in ("actor", "rollout", "reference", "reward")},
    **{
        f"roles.{role}.strategy.placement.collectives": "of axes that span levels (tests/placement)"
        for role in ("actor", "rollout", "reference", "reward")
    },
    "rl.optimizer.adamw.name": "of the kind of optimizer that it is in: one value",
    "warmup.optimizer.adamw.name": "likewise",
    "roles.address": "of a Ray cluster, which is not here (tests/ray_cluster)",
    "roles.reference.strategy.precision.reduce": "of gradients, which a reference has none of",
    "roles.reward.strategy.precision.reduce": "of gradients, which a reward model has none of",
}
"""Keys that these runs do not read, with the reason."""


def runs(folder: Path) -> list[RLConfig]:
    """Runs that use between them what one rank can: groups apart, and one group whose roles take turns."""
    spread = {"memory": {"recompute": "layer", "recompute_layers": 1}}
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{row:03}=", "answer": "1"}) for row in range(20)))
    file = {
        "name": None,
        "settings": {},
        "prompts": str(prompts),
        "held_out": str(prompts),
        "reward": "model",
    }
    scores = {"model": str(reward_folder(folder / "scores")), "strategy": spread}
    apart = {
        "actor": {"devices": 0, "strategy": spread, "engine": "graph", "profile": {"steps": 1}},
        "rollout": {"devices": 1, "page": 16, "strategy": {"memory": {"device": "64MiB"}}},
        "reference": {"devices": 2, "strategy": spread},
    }
    (folder / "flash").mkdir()
    few = {"steps": 1, "prompts": 2, "group": 2, "max_tokens": 2}
    return [
        rl_config(folder / "apart", model={"adapter": {"rank": 2}}, rl={**few, "kl": 0.1}, roles=apart),
        rl_config(
            folder / "turns",
            rl={**few, "algorithm": "ppo", "objective": "truncated"},
            warmup={"steps": 2, "batch": 4, "until": 0.9},
            eval={"prompts": 2},
            roles={"rollout": {"page": 16}, "sleep": {"host": "64MiB", "flash": str(folder / "flash")}},
        ),
        *(
            rl_config(
                folder / "scored",
                rl={**few, "steps": steps},
                characters="0123456789=",
                task=file,
                roles={"reward": scores},
            )
            for steps in (1, 2)  # the second resumes the first
        ),
    ]


def run_reads(rank: int, world: int, runs: list[dict[str, Any]]) -> set[str]:
    with key_reads(RL_ROOTS) as read:
        for data in runs:
            config = RLConfig.model_validate(data)
            with engine_of(config):
                run(config, engine=InlineEngine)  # type: ignore[arg-type]
    return read


def actor_reads(rank: int, world: int, data: dict[str, Any]) -> set[str]:
    """Of an actor on `world` ranks, with one optimizer after the other, and of a rollout on as many."""
    with key_reads(RL_ROOTS) as read:
        for name in OPTIMIZERS:
            data["rl"] |= {"optimizer": {"name": name}, "schedule": {"name": "wsd", "warmup": 1}}
            data["warmup"] = {"optimizer": {"name": name}}
            config = RLConfig.model_validate(data)
            device_count(config)
            device, tokenizer = torch.device("cpu"), tokenizer_of(config)
            model = trained_policy(config, tokenizer, config.roles.actor.strategy, device)
            actor = Actor(config, model, tokenizer, device)
            actor.warm_up([("12=", "12")] * 4)
            samples = samples_of(config)
            actor.train([replace(one, reward=float(one.place % 2)) for one in samples])
        rollout_model(config, tokenizer, device)
    return read


def all_reads(folder: Path) -> set[str]:
    data = [config.model_dump(mode="json") for config in runs(folder)]
    two = {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
        "rollout": {"devices": "2-3", "strategy": {"axes": {"tensor": 2}}},
    }
    config = rl_config(folder / "two", rl={"steps": 2}, roles=two)
    read: set[str] = run_ranks(run_reads, 1, data, timeout=250)[0]
    return read | run_ranks(actor_reads, 2, config.model_dump(mode="json"), timeout=250)[0]


def test_every_key_is_read_or_refused(tmp_path: Path) -> None:
    base = rl_config(tmp_path / "base").model_dump(mode="json", exclude_defaults=True)
    read = all_reads(tmp_path)
    assert "rl.optimizer.lr" in read, "reads are seen"
    ignored = ignored_keys(RLConfig, {**base, "version": 1}, read | ELSEWHERE.keys())
    assert not ignored, "\n".join(ignored)


KEYS = [
    ("launch", {"workers": 2}, "'launch.workers' is not used here; it is the number of devices that"),
    ("launch", {"nodes": 2, "rendezvous": "a:1"}, "'launch.nodes' is not used here; several machines are"),
    ("checkpoint", {"resume_from": 2}, "'checkpoint.resume_from' is not used here"),
    ("rl", {"critic": {"lr": 0.1}}, "'rl.critic' is not used here; it is the critic of ppo"),
    ("rl", {"truncate": 3.0}, "'rl.truncate' is not used here"),
    ("rl", {"algorithm": "rloo", "scale": "none"}, "'rl.scale' is not used here"),
    ("task", {"held_out": "file.jsonl"}, "'task.held_out' is not used here"),
    ("roles", {"reference": {"devices": 1}}, "'roles.reference' is not used here"),
    (
        "roles",
        {"rollout": {"threads": 2}},
        "'roles.rollout.threads' is not used here; 'rollout' takes turns in",
    ),
    ("roles", {"actor": {"strategy": {"overlap": {"schedule": "none"}}}}, "section 'overlap' schedules"),
    ("roles", {"actor": {"strategy": {"expert_balance": {}}}}, "'expert_balance' moves experts between"),
]


@pytest.mark.parametrize(("section", "given", "line"), KEYS, ids=lambda one: str(one)[:40])
def test_keys_that_nothing_reads_are_refused(
    section: str, given: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        rl_config(tmp_path, **{section: given})
    assert "leave it out" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_roles_apart_have_threads_of_their_own(tmp_path: Path) -> None:
    rl_config(tmp_path, roles={"rollout": {"devices": 1, "threads": 2}}, launch={"workers": None})
    rl_config(tmp_path, roles={"split": "auto"}, launch={"workers": 2})
