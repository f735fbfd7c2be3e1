"""The actor's gradients on any axes are those of a plain loss in PyTorch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_runs import rl_config, samples_of, whole_weights
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.policy_model import tokenizer_of, trained_policy
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard.sharded_model import sharded

AXES = [{"shard": 2}, {"tensor": 2}, {"replicate": 2}]


def actor_of(config: RLConfig) -> Actor:
    tokenizer, device = tokenizer_of(config), torch.device("cpu")
    model = trained_policy(config, tokenizer, config.roles.actor.strategy, device)
    return Actor(config, model, tokenizer, device)


def trained(rank: int, world: int, data: dict[str, Any]) -> dict[str, Any]:
    """Gradients of an update, log-probabilities before it, metrics, and the weights after it."""
    config = RLConfig.model_validate(data)
    actor = actor_of(config)
    samples = samples_of(config)
    before = actor.logprobs(samples)
    gradients: dict[str, Tensor] = {}

    def kept(scale: Any) -> None:
        handle = sharded(actor.model)
        for one in handle.parameters():
            assert one.grad is not None
            gradients[one.name] = handle.gather(one.grad, one.layout).clone()

    actor.optimizer.step = kept  # type: ignore[method-assign]
    metrics = actor.train(samples)
    return {"gradients": gradients, "logprobs": before, "metrics": metrics}


def plain(config: RLConfig) -> tuple[dict[str, Tensor], float, list[list[float]]]:
    """GRPO's loss (arXiv 2402.03300, equation 3), written out for one answer after the other."""
    actor = actor_of(config)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(actor.model.config)
    model.load_state_dict(whole_weights(actor.model), strict=False)
    samples = samples_of(config)
    rewards = torch.tensor([one.reward for one in samples]).view(-1, config.rl.group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    total, logprobs = torch.zeros(()), []
    for one, advantage in zip(samples, advantages, strict=True):
        own = _logprobs(model, one, config.rl.temperature)
        logprobs.append(own.tolist())
        ratio = (own - torch.tensor(one.logprobs)).exp()
        clipped = ratio.clamp(1 - config.rl.clip, 1 + config.rl.clip)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).mean() / len(samples)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(total), logprobs


def _logprobs(model: Any, one: Sample, temperature: float) -> Tensor:
    ids = torch.tensor([[*one.prompt, *one.tokens]])
    logits = model(ids).logits[0, len(one.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_gradients_are_those_of_one_device(axes: dict[str, int], tmp_path: Any) -> None:
    config = rl_config(
        tmp_path,
        rl={
            "steps": 1,
            "prompts": 4,
            "group": 4,
            "max_tokens": 6,
            "temperature": 0.9,
            "micro_batch": 3 if "tensor" in axes else None,
            "grad_clip": None,
        },
        roles={"actor": {"devices": "0-1", "strategy": {"axes": axes}}},
    )
    expected, loss, logprobs = plain(
        rl_config(tmp_path, rl={"temperature": 0.9, "max_tokens": 6, "prompts": 4, "group": 4})
    )
    for got in run_ranks(trained, 2, config.model_dump(mode="json")):
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
        for own, other in zip(got["logprobs"], logprobs, strict=True):
            assert own == pytest.approx(other, abs=1e-5)
        assert got["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got["gradients"][name], gradient, atol=1e-6, rtol=1e-5, msg=name)
