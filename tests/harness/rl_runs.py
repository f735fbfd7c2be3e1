"""Small runs of reinforcement learning, and the plain loop that a synchronous run must equal bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_reward import share
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import RewardModel, rollout_model, tokenizer_of, trained_policy
from hyper_parallel.rl.roles.rollout import Rollout
from hyper_parallel.rl.sample import Prompted, Sample
from hyper_parallel.rl.tasks import tasks
from hyper_parallel.rl.weights.transfer import local_tensors
from hyper_parallel.shard.sharded_model import is_sharded, sharded

REWARD = Path(__file__).with_name("rl_reward.py")
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rl_config(out: str | Path, **sections: Any) -> RLConfig:
    """A run of few small steps; `sections` are merged into it, key by key."""
    given: dict[str, Any] = {
        "version": 1,
        "out": str(out),
        "model": {"config": MODEL},
        "task": {"name": "sort", "settings": {"digits": 3}, "reward": f"{REWARD}:share"},
        "rl": {
            "steps": 3,
            "prompts": 4,
            "group": 4,
            "max_tokens": 4,
            "optimizer": {"name": "adamw", "lr": 1e-3},
        },
        "eval": {"prompts": 16},
        "roles": {"rollout": {"page": 16}},
        "launch": {"threads": 1, "device": "cpu", "timeout": 60},
        "trackers": [],
    }
    for key, value in sections.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    return build(RLConfig, [("run.yaml", given)], ())


def samples_of(config: RLConfig, seed: int = 0, reward: bool = True) -> list[Sample]:
    """Made-up answers of a batch, of several lengths, with behaviour log-probabilities near those of a new model."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary, found = 13, []
    for ticket in range(config.rl.prompts):
        prompt = torch.randint(2, vocabulary, (3 + ticket % 2,), generator=generator).tolist()
        for place in range(config.rl.group):
            count = int(torch.randint(1, config.rl.max_tokens + 1, (), generator=generator))
            found.append(
                Sample(
                    ticket=ticket,
                    place=place,
                    row=ticket,
                    prompt=tuple(prompt),
                    tokens=tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist()),
                    logprobs=tuple(
                        (torch.randn(count, generator=generator) * 0.3 - math.log(vocabulary)).tolist()
                    ),
                    versions=(0,) * count,
                    drawn=(True,) * count,
                    ended=True,
                    reward=float(torch.randint(0, 2, (), generator=generator)) if reward else None,
                )
            )
    return found


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Every parameter, gathered on every rank."""
    if not is_sharded(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}
    handle = sharded(model)
    return {one.name: handle.gather(one.local, one.layout).clone() for one in handle.parameters()}


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Every weight of the model without adapters, whole, with W + s B A in place of W."""
    whole, found = whole_weights(model), {}
    for name, value in whole.items():
        layer, base, kind = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if base and kind == "weight":
            scale = model.get_submodule(layer).scaling["default"]
            a, b = (whole[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
            value = value + b @ a * scale
        found[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = value
    return found


def plain_loop(rank: int, world: int, data: dict[str, Any]) -> dict[str, Tensor]:
    """A synchronous run without controller, queue, transfers or groups: generate, score, train, copy; on every rank."""
    config = RLConfig.model_validate(data)
    device = torch.device("cpu")
    tokenizer = tokenizer_of(config)
    model = trained_policy(config, tokenizer, config.roles.actor.strategy, device)
    actor = Actor(config, model, tokenizer, device)
    rollout = Rollout(config, rollout_model(config, tokenizer, device), tokenizer)
    role = config.roles.rewards
    judge = RewardModel(role, device) if role is not None else None
    copies = config.roles.rollouts.spread.axes.replicate
    rl, task = config.rl, config.task
    for step in range(rl.steps):
        _copy(actor.model, rollout.model)
        rollout.renewed(step * rl.minibatches)
        rows = range(step * rl.prompts, (step + 1) * rl.prompts)
        given = {row: tasks("sort", config.seed, "train", 1, first=row, **task.settings)[0] for row in rows}
        new = [
            Prompted(ticket=row, place=place, row=row, prompt=given[row]["prompt"])
            for row in rows
            for place in range(rl.group)
        ]
        found = rollout.generate(new, 1000)
        while rollout.busy:
            found += rollout.generate([], 1000)
        if copies > 1 or world > 1:
            found = _of_all_ranks(found)
        found.sort(key=lambda one: (one.row, one.place))
        rewards = [share(given[one.row]["prompt"], one.text, given[one.row]) for one in found]
        if judge is not None:
            groups = [found[at : at + rl.group] for at in range(0, len(found), rl.group)]
            scores = judge.scores([[(given[one.row]["prompt"], one.text) for one in own] for own in groups])
            rewards = [one for group in scores for one in group if one is not None]
        actor.train([replace(one, reward=reward) for one, reward in zip(found, rewards, strict=True)])
    return whole_weights(actor.model)


def expected_weights(config: RLConfig) -> dict[str, Tensor]:
    """The weights at the end of the plain loop, on as many ranks as the actor or a rollout has."""
    world = max(config.roles.actor.strategy.world, config.roles.rollouts.spread.world)
    return run_ranks(plain_loop, world, config.model_dump(mode="json"))[0]


def saved_weights(checkpoint: str) -> dict[str, Tensor]:
    """The parameters in a checkpoint, whole."""
    return {
        name.removeprefix("model."): value
        for name, value in saved_tensors(checkpoint).items()
        if name.startswith("model.")
    }


def saved_tensors(checkpoint: str) -> dict[str, Tensor]:
    """All tensors in a checkpoint, whole: the optimizer's and the critic's, too."""
    from hyper_parallel.checkpoint.reader import read
    from hyper_parallel.checkpoint.shard import Piece
    from hyper_parallel.layout import Layout, Mesh

    found = Checkpoint(Path(checkpoint))
    mesh = Mesh(("replicate", 1))
    pieces = {
        name: Piece(torch.empty(one.shape, dtype=one.dtype), Layout.replicated(mesh, one.shape))
        for name, one in found.tensors.items()
    }
    read(Path(checkpoint), pieces, rank=0)
    return {name: piece.local for name, piece in pieces.items()}


def _copy(source: Any, target: Any) -> None:
    """Whole weights, adapters merged, into a model with another layout."""
    whole = merged_weights(source)
    with torch.no_grad():
        for name, local in local_tensors(target).items():
            if is_sharded(target):
                layout = next(one.layout for one in sharded(target).parameters() if one.name == name)
                local.copy_(sharded(target).cut(whole[name], layout))
            else:
                local.copy_(whole[name])


def _of_all_ranks(found: list[Sample]) -> list[Sample]:
    import torch.distributed as dist

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    unique = {(one.row, one.place): one for part in told for one in part}
    return list(unique.values())
