"""Advantages of a batch's tokens, from the rewards of its groups and, for PPO, the critic's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyper_parallel.config.rl import RLTraining
from hyper_parallel.rl.losses.advantages import (
    group_advantages,
    leave_one_out_advantages,
    reinforce_pp_baseline_advantages,
)
from hyper_parallel.rl.losses.gae import gae, token_rewards, whiten
from hyper_parallel.rl.sample import Sample


def mask_of(samples: Sequence[Sample]) -> Tensor:
    """bool [answers, tokens]: what the policy drew, of answers with a reward."""
    mask = torch.zeros(len(samples), max(len(one.tokens) for one in samples), dtype=torch.bool)
    for row, one in enumerate(samples):
        if one.reward is not None:
            mask[row, : len(one.tokens)] = torch.tensor(one.drawn)
    return mask


def advantages_of(rl: RLTraining, samples: Sequence[Sample]) -> list[list[float]]:
    """Of each sample's tokens, without a critic. Samples come group after group; one without a reward gets 0."""
    missing = float("nan")
    rewards = torch.tensor([missing if one.reward is None else one.reward for one in samples])
    grouped = rewards.view(-1, rl.group)
    if rl.algorithm == "reinforce++":
        return _rows(reinforce_pp_baseline_advantages(grouped, mask_of(samples)), samples)
    if rl.algorithm == "rloo":
        found = leave_one_out_advantages(grouped)
    else:
        found = group_advantages(grouped, scale=rl.scale)
    return [[value] * len(one.tokens) for value, one in zip(found.flatten().tolist(), samples, strict=True)]


def estimated(
    rl: RLTraining, samples: Sequence[Sample], values: Sequence[Sequence[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages and returns of each sample's tokens, from the critic's values of them."""
    mask = mask_of(samples)
    scores = torch.tensor([one.reward or 0.0 for one in samples])
    own = torch.zeros(mask.shape)
    for row, given in enumerate(values):
        own[row, : len(given)] = torch.tensor(given)
    advantages, returns = gae(
        token_rewards(scores, mask), own, mask, gamma=rl.critic.gamma, lam=rl.critic.lam
    )
    return _rows(whiten(advantages, mask), samples), _rows(returns, samples)


def _rows(values: Tensor, samples: Sequence[Sample]) -> list[list[float]]:
    host = values.tolist()
    return [row[: len(one.tokens)] for row, one in zip(host, samples, strict=True)]
