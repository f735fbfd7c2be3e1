"""Losses of `hyper_parallel.rl.losses` as a case of a comparison with TRL asks for them: a batch and settings, in plain
data, so that a file can hold them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hyper_parallel.rl.losses.advantages import (
    gae,
    group_advantages,
    leave_one_out_advantages,
    token_rewards,
    whiten,
)
from hyper_parallel.rl.losses.policy import PolicyObjective, kl_estimate, policy_loss, value_loss
from hyper_parallel.rl.losses.preference import dpo_loss, kto_loss, kto_reference_point, reward_model_loss
from hyper_parallel.rl.losses.reductions import loss_count, sequence_logprobs

Batch = dict[str, Tensor]
Outputs = dict[str, Tensor]

CLIPS = ("clip_low", "clip_high", "dual_clip", "weight_cap", "kl", "entropy", "ratio", "normalization")


def policy(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """The policy loss, with the counts of the normalization from the whole batch."""
    objective: Literal["truncated", "behaviour"] = "truncated" if "weight_cap" in settings else "behaviour"
    chosen = {name: settings[name] for name in CLIPS if name in settings}
    normalization = settings["normalization"]
    counted = batch["generated_mask"] if normalization == "dapo" else batch["mask"]
    counts = {name: settings[name] for name in ("max_length", "updates") if name in settings}
    logprobs = batch["logprobs"].clone().requires_grad_()
    entropy = batch["entropy"].clone().requires_grad_()
    found = policy_loss(
        logprobs,
        behaviour=batch["behaviour"],
        proximal=batch["proximal"],
        reference=batch["reference"],
        entropy=entropy,
        advantages=batch["advantages"],
        mask=batch["mask"],
        count=loss_count(normalization, counted, **counts),
        settings=PolicyObjective(objective=objective, **chosen),
    ).loss
    gradients = torch.autograd.grad(found, [logprobs, entropy], allow_unused=True)
    outputs = {"loss": found.detach(), "gradient": gradients[0]}
    return outputs | ({"entropy_gradient": gradients[1]} if gradients[1] is not None else {})


def rloo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """The policy loss with the whole answer as one action, averaged over answers."""
    return policy(batch, {**settings, "ratio": "sequence_product", "normalization": "grpo"})


def advantages(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """Of groups, with the KL penalty in the reward for RLOO."""
    rewards = batch["rewards"]
    if settings["trainer"] == "GRPO":
        return {"advantages": group_advantages(rewards, scale=settings["scale"])}
    divergence = kl_estimate(batch["behaviour"], batch["reference"], "k1")
    penalty = settings.get("kl", 0.0) * sequence_logprobs(divergence, batch["mask"])
    penalized = rewards - penalty.reshape(rewards.shape)
    return {"advantages": leave_one_out_advantages(penalized, normalize=settings["normalize"])}


def dpo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """The first half of the rows is chosen, the second rejected."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    chosen, rejected = sequence_logprobs(logprobs, batch["mask"]).chunk(2)
    references = sequence_logprobs(batch["reference"], batch["mask"]).chunk(2)
    tokens = batch["mask"].sum(1).chunk(2)
    found = dpo_loss(
        chosen,
        rejected,
        reference_chosen=references[0],
        reference_rejected=references[1],
        count=len(chosen),
        chosen_tokens=tokens[0],
        rejected_tokens=tokens[1],
        **settings,
    ).loss
    return {"loss": found.detach(), "gradient": torch.autograd.grad(found, logprobs)[0]}


def kto(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """Every second answer is desirable; `proximal` and `behaviour` stand for the mismatched answers."""
    mask = batch["mask"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    point = kto_reference_point(
        sequence_logprobs(batch["proximal"], mask), sequence_logprobs(batch["behaviour"], mask)
    )
    found = kto_loss(
        sequence_logprobs(logprobs, mask),
        reference=sequence_logprobs(batch["reference"], mask),
        desirable=torch.arange(len(logprobs)) % 2 == 0,
        reference_point=point,
        count=len(logprobs),
        **settings,
    ).loss
    return {"loss": found.detach(), "gradient": torch.autograd.grad(found, logprobs)[0]}


def reward_model(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """Scores are the advantages, the first half of the chosen answers; margins the entropies of the first token."""
    scores = batch["advantages"].clone().requires_grad_()
    chosen, rejected = scores.chunk(2)
    margin = batch["entropy"][: len(chosen), 0] if settings["margin"] else None
    found = reward_model_loss(
        chosen, rejected, count=len(chosen), margin=margin, centering=settings["centering"]
    )
    return {"loss": found.loss.detach(), "gradient": torch.autograd.grad(found.loss, scores)[0]}


def ppo(batch: Batch, settings: dict[str, Any]) -> Outputs:
    """Rewards of tokens, GAE, whitened advantages, and the loss of the policy plus that of the critic.

    `mask` has the tokens of the policy's loss, `value_mask` those of the critic: TRL gives it one more, after an answer
    that ended, and the answer's score belongs to that.
    """
    kl = kl_estimate(batch["behaviour"], batch["reference"], settings["kl_estimator"])
    rewards = token_rewards(batch["scores"], batch["value_mask"], kl, settings["kl_coefficient"])
    raw, returns = gae(
        rewards, batch["old_values"], batch["value_mask"], gamma=settings["gamma"], lam=settings["lam"]
    )
    white = whiten(raw, batch["mask"])
    logprobs = batch["logprobs"].clone().requires_grad_()
    values = batch["values"].clone().requires_grad_()
    clip = settings["clip"]
    policy_part = policy_loss(
        logprobs,
        behaviour=batch["behaviour"],
        advantages=white,
        mask=batch["mask"],
        count=loss_count("bnpo", batch["mask"]),
        settings=PolicyObjective(clip_low=clip, clip_high=clip, normalization="bnpo"),
    )
    value_part = value_loss(
        values,
        old_values=batch["old_values"],
        returns=returns,
        mask=batch["value_mask"],
        count=loss_count("bnpo", batch["value_mask"]),
        clip=settings["value_clip"],
    )
    total = policy_part.loss + settings["value_coefficient"] * value_part.loss
    gradients = torch.autograd.grad(total, [logprobs, values])
    return {
        "rewards": rewards,
        "returns": returns,
        "advantages": white,
        "policy_loss": policy_part.loss.detach(),
        "value_loss": value_part.loss.detach(),
        "loss": total.detach(),
        "gradient": gradients[0],
        "value_gradient": gradients[1],
    }


FUNCTIONS = {
    "policy": policy,
    "rloo": rloo,
    "advantages": advantages,
    "dpo": dpo,
    "kto": kto,
    "reward_model": reward_model,
    "ppo": ppo,
}
