"""An actor with LoRA adapters: its gradients, what others get of it, and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_faults import left_behind
from harness.rl_runs import (
    expected_weights,
    merged_weights,
    rl_config,
    samples_of,
    saved_weights,
    whole_weights,
)
from hyper_parallel.checkpoint import export
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import tokenizer_of, trained_policy
from hyper_parallel.rl.run import run
from hyper_parallel.rl.weights.merged_adapters import sent_tensors
from hyper_parallel.rl.weights.transfer import describe
from hyper_parallel.shard.sharded_model import sharded
from rl.roles.test_actor import plain_gradients

CPU = torch.device("cpu")
LORA = {"adapter": {"rank": 4, "targets": ["q_proj", "v_proj", "o_proj", "down_proj"]}}
APART = {"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}}


def adapted(config: RLConfig) -> Actor:
    """An actor whose B are not zeros, so that every gradient says something; the same values under any strategy."""
    tokenizer = tokenizer_of(config)
    actor = Actor(config, trained_policy(config, tokenizer, config.roles.actor.strategy, CPU), tokenizer, CPU)
    with torch.no_grad():
        for number, one in enumerate(actor.handle.owned()):
            if ".lora_B." in one.name:
                generator = torch.Generator().manual_seed(number)
                whole = 0.1 * torch.randn(one.layout.shape, generator=generator)
                one.local.copy_(actor.handle.cut(whole, one.layout))
    return actor


def one_update(rank: int, world: int, data: dict[str, Any]) -> dict[str, Any]:
    config = RLConfig.model_validate(data)
    actor = adapted(config)
    merged = merged_weights(actor.model)
    gradients: dict[str, Tensor] = {}

    def kept(scale: Any) -> None:
        for one in actor.handle.parameters():
            if one.grad is not None:
                gradients[one.name] = actor.handle.gather(one.grad, one.layout).clone()

    stepped = actor.optimizer.step
    actor.optimizer.step = lambda scale: (kept(scale), stepped(scale))  # type: ignore[assignment, return-value]
    before = whole_weights(actor.model)
    metrics = actor.train(samples_of(config))
    sent = sent_tensors(actor.model)
    handle = sharded(actor.model)
    layouts = {one.name: one.layout for one in describe(actor.model, "actor", world).parameters}
    assert sent.keys() == layouts.keys()
    return {
        "merged": merged,
        "gradients": gradients,
        "metrics": metrics,
        "before": before,
        "after": whole_weights(actor.model),
        "merged after": merged_weights(actor.model),
        "sent": {name: handle.gather(tensor, layouts[name]).clone() for name, tensor in sent.items()},
    }


@pytest.mark.parametrize("axes", [{}, {"shard": 2}, {"tensor": 2}], ids=str)
def test_gradients_and_updates_are_those_of_one_device(axes: dict[str, int], tmp_path: Path) -> None:
    rl = {"prompts": 4, "group": 4, "max_tokens": 6, "steps": 1, "grad_clip": None}
    world = 2 if axes else 1
    actor = {"devices": list(range(world)), "strategy": {"axes": axes}}
    config = rl_config(tmp_path, model=LORA, rl=rl, roles={"actor": actor})
    first, *others = run_ranks(one_update, world, config.model_dump(mode="json"))
    # The chain rule through W' = W + s B A: dA = s Bᵀ dW', dB = s dW' Aᵀ.
    whole, loss, _ = plain_gradients(rl_config(tmp_path, rl=rl), first["merged"])
    assert first["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert len(first["gradients"]) == 2 * 4 * 2
    for name, gradient in first["gradients"].items():
        layer = name.partition(".lora_")[0]
        a, b = (first["before"][f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
        change = 2.0 * whole[layer.removeprefix("base_model.model.") + ".weight"]
        expected = b.mT @ change if ".lora_A." in name else change @ a.mT
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5, msg=name)
    for name, value in first["after"].items():
        trained = ".lora_" in name
        assert torch.equal(value, first["before"][name]) != trained, name
    for name, value in first["merged after"].items():
        assert torch.equal(first["sent"][name], value), name
    for other in others:
        for name, value in first["after"].items():
            assert torch.equal(other["after"][name], value), name


PLACES: dict[str, dict[str, Any]] = {
    "in turns": {},
    "apart": APART,
    "two ranks": {
        "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
        "rollout": {"devices": 2, "page": 16},
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_bit_for_bit_the_plain_loop(place: str, tmp_path: Path) -> None:
    """Whose rollout generates with weights that are merged by hand."""
    config = rl_config(tmp_path / "run", model=LORA, roles=PLACES[place], eval={"prompts": 4})
    summary = run(config)
    assert summary.checkpoint is not None
    found, expected = saved_weights(summary.checkpoint), expected_weights(config)
    assert any(".lora_A." in name for name in expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not left_behind()


def test_a_run_goes_on_and_is_exported_merged(tmp_path: Path) -> None:
    """With a warm-up, a reference that is the warmed-up policy, and PPO's critic, which begins as that."""
    sections: dict[str, Any] = {
        "model": LORA,
        "rl": {"steps": 2, "kl": 0.1, "algorithm": "ppo", "optimizer": {"name": "adamw", "lr": 1e-2}},
        "warmup": {"steps": 2, "batch": 8},
        "eval": {"prompts": 4},
    }
    whole = run(rl_config(tmp_path / "whole", **sections))
    run(
        rl_config(tmp_path / "run", **sections, checkpoint={"every": 1}), stop=_after_a_step(tmp_path / "run")
    )
    second = run(rl_config(tmp_path / "run", **sections, checkpoint={"every": 1}))
    assert second.resumed_from == 1
    assert whole.checkpoint is not None
    assert second.checkpoint is not None
    expected, found = saved_weights(whole.checkpoint), saved_weights(second.checkpoint)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(export(second.checkpoint, tmp_path / "model"))
    weights = dict(exported.named_parameters())
    layer = "model.layers.1.self_attn.q_proj"
    base = f"base_model.model.{layer}"
    a, b = (found[f"{base}.lora_{factor}.default.weight"] for factor in "AB")
    assert b.abs().max() > 0
    expected_weight = found[f"{base}.base_layer.weight"] + b @ a * 2.0
    torch.testing.assert_close(weights[f"{layer}.weight"].detach(), expected_weight, atol=0, rtol=1e-6)


def _after_a_step(out: Path) -> Any:
    def stop() -> bool:
        file = out / "metrics.jsonl"
        return file.exists() and '"reward"' in file.read_text()

    return stop


def test_a_weight_in_two_places_has_no_adapter(tmp_path: Path) -> None:
    model = {"adapter": {"rank": 2, "targets": ["lm_head"]}}
    config = rl_config(tmp_path, model=model)
    tied = {**(config.model.config or {}), "tie_word_embeddings": True}
    config = rl_config(tmp_path, model={**model, "config": tied})
    with pytest.raises(ConfigError, match=r"model\.adapter\.targets: the weight of 'lm_head' is tied"):
        trained_policy(config, tokenizer_of(config), config.roles.actor.strategy, CPU)
