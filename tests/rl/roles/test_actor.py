"""The actor's gradients on any axes are those of a plain loss in PyTorch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ranks import run_ranks
from harness.rl_runs import rl_config, samples_of, whole_weights
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.losses.policy import PolicyObjective, policy_loss
from hyper_parallel.rl.roles import policy_update
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import tokenizer_of, trained_policy
from hyper_parallel.rl.roles.policy_update import advantages_of, length_of, rows_of
from hyper_parallel.rl.sample import Sample
from hyper_parallel.shard.sharded_model import sharded

AXES = [{"shard": 2}, {"tensor": 2}, {"replicate": 2}]
GRPO = {"algorithm": "grpo"}
RLOO = {"algorithm": "rloo", "clip": 0.5}
"""Ratios of whole answers, of which this clips some and not others."""
GSPO = {"algorithm": "grpo", "ratio": "answer_mean"}


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


def plain_gradients(
    config: RLConfig, weights: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], float, list[list[float]]]:
    """GRPO's loss (arXiv 2402.03300, equation 3), RLOO's (2402.14740) or GSPO's (2507.18071, section 4), written out
    for one answer after the other. `weights`: whole ones, the run's without."""
    actor = actor_of(config)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(actor.model.config)
    model.load_state_dict(weights or whole_weights(actor.model), strict=False)
    samples = samples_of(config)
    rewards = torch.tensor([one.reward for one in samples]).view(-1, config.rl.group)
    if config.rl.algorithm == "rloo":
        others = (rewards.sum(1, keepdim=True) - rewards) / (config.rl.group - 1)
        advantages = (rewards - others).flatten()
    else:
        scale = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / scale).flatten()
    total, logprobs = torch.zeros(()), []
    for one, advantage in zip(samples, advantages, strict=True):
        own = _logprobs(model, one, config.rl.temperature)
        logprobs.append(own.tolist())
        change = own - torch.tensor(one.logprobs)
        if config.rl.ratios != "token":
            change = change.sum() if config.rl.ratios == "answer" else change.mean()
        ratio = change.exp()
        clipped = ratio.clamp(1 - config.rl.clip, 1 + config.rl.clip)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).mean() / len(samples)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(total), logprobs


def _logprobs(model: Any, one: Sample, temperature: float) -> Tensor:
    ids = torch.tensor([[*one.prompt, *one.tokens]])
    logits = model(ids).logits[0, len(one.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("axes", "kind"),
    [*((axes, GRPO) for axes in AXES), *((axes, RLOO) for axes in AXES), ({"shard": 2}, GSPO)],
    ids=str,
)
def test_gradients_are_those_of_one_device(axes: dict[str, int], kind: dict[str, Any], tmp_path: Any) -> None:
    rl = {"prompts": 4, "group": 4, "max_tokens": 6, "temperature": 0.9, **kind}
    micro = 3 if "tensor" in axes else None
    config = rl_config(
        tmp_path,
        rl={**rl, "steps": 1, "micro_batch": micro, "grad_clip": None},
        roles={"actor": {"devices": "0-1", "strategy": {"axes": axes}}},
    )
    expected, loss, logprobs = plain_gradients(rl_config(tmp_path, rl=rl))
    for got in run_ranks(trained, 2, config.model_dump(mode="json")):
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
        for own, other in zip(got["logprobs"], logprobs, strict=True):
            assert own == pytest.approx(other, abs=1e-5)
        assert got["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got["gradients"][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("objective", ["behaviour", "truncated"])
def test_a_run_has_the_loss_of_losses(objective: str, tmp_path: Any) -> None:
    """Of `rloo`, which equals TRL's (`test_losses_equal_trl`), with its gradient, KL penalty and metrics."""
    config = rl_config(tmp_path, rl={**RLOO, "objective": objective, "kl": 0.05, "micro_batch": None})
    samples = samples_of(config)
    generator = torch.Generator().manual_seed(1)
    rows = rows_of(samples, length_of(samples, 8), torch.device("cpu"))
    drawn = rows.drawn
    logprobs, old, reference = (
        (rows.behaviour + 0.2 * torch.randn(drawn.shape, generator=generator)).masked_fill(~drawn, 0)
        for _ in range(3)
    )
    count = policy_update.count_of(config.rl, samples, samples)
    advantages = advantages_of(config.rl, samples)
    settings = policy_update.settings_of(config.rl)
    sums = policy_update.MetricSums()
    tokens = policy_update.PolicyTokens(
        settings=settings,
        temperature=1.0,
        weights=policy_update.weights_of(config.rl, drawn, count),
        behaviour=rows.behaviour,
        advantages=rows.placed(advantages, samples),
        proximal=old if objective == "truncated" else None,
        reference=reference,
        sums=sums,
    )
    given, value = policy_update.answer_objective(tokens, logprobs)
    asked = logprobs.clone().requires_grad_()
    zero = sum(
        given(asked[:, part], *(one[:, part] for one in given.inputs))
        for part in (slice(0, 3), slice(3, None))
    )
    zero.backward()
    leaf = logprobs.clone().requires_grad_()
    expected = policy_loss(
        leaf,
        behaviour=rows.behaviour,
        advantages=torch.tensor([one[0] for one in advantages]),
        mask=drawn,
        count=count,
        settings=PolicyObjective(
            objective=objective,
            ratio="sequence_product",
            clip_low=0.5,
            clip_high=0.5,
            weight_cap=2.0 if objective == "truncated" else None,
            normalization="grpo",
            kl=0.05,
        ),
        proximal=old,
        reference=reference,
    )
    expected.loss.backward()
    torch.testing.assert_close(value, expected.loss.detach())
    torch.testing.assert_close(asked.grad, leaf.grad)
    assert float(zero) == 0
    assert sums.total is not None
    names = policy_update.metric_names(settings, proximal=objective == "truncated", reference=True)
    found = dict(zip(names, sums.total[1:].tolist(), strict=True))
    assert found["clipped_high"] == float(expected.sums["clipped_high"]) > 0
