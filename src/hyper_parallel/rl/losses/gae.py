"""Generalized advantage estimation over the tokens of answers, their rewards, and whitening (PPO).

GAE (arXiv 1506.02438, section 3), with r_t the reward and V_t the value of trained token t, and t+ the next one:

    δ_t = r_t + γ V_{t+} − V_t        A_t = δ_t + γ λ A_{t+}        R_t = A_t + V_t

The recursion steps over tokens that are not trained (the text of an environment, padding): nothing is discounted there.

Rewards of tokens (InstructGPT, arXiv 2203.02155, equation 2): r_t = −β KL_t, and the answer's score at its last trained
token. Whitening: (x − mean) / sqrt(variance + 1e-8), of the trained tokens, with the unbiased variance, as in TRL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.rl.losses.reductions import floats, require_shape, trained_tokens


def token_rewards(
    scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0
) -> Tensor:
    """Rewards of tokens [sequences, tokens] from the scores of answers [sequences] and the KL of tokens, 0 elsewhere.

    `kl` is detached: a reward has no gradient. A sequence without a trained token has no reward.
    """
    trained = trained_tokens(mask)
    places = torch.arange(trained.shape[1], device=trained.device)
    last = torch.where(trained, places, -1).amax(1, keepdim=True)
    rewards = torch.where(places == last, floats(scores)[:, None], 0.0)
    if kl is not None:
        require_shape("the KL of tokens", kl, mask)
        rewards = rewards - kl_coefficient * torch.where(trained, floats(kl.detach()), 0.0)
    return rewards


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the trained tokens, both [sequences, tokens] and 0 elsewhere, without a gradient.

    `rewards`, `values` and `mask` are [sequences, tokens]. `last_values` [sequences] is the value after the last
    trained token: of an answer that was cut and not ended; 0 without it.
    """
    require_shape("rewards", rewards, mask)
    require_shape("values", values, mask)
    trained = trained_tokens(mask)
    rewards, values = floats(rewards.detach()), floats(values.detach())
    following = torch.zeros_like(values[:, 0]) if last_values is None else floats(last_values.detach())
    advantage = torch.zeros_like(following)
    advantages = torch.zeros_like(values)
    for token in range(mask.shape[1] - 1, -1, -1):
        here = trained[:, token]
        delta = rewards[:, token] + gamma * following - values[:, token]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        following = torch.where(here, values[:, token], following)
        advantages[:, token] = torch.where(here, advantage, 0.0)
    return advantages, torch.where(trained, advantages + values, 0.0)


def token_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the values of trained tokens: [3], float64; those of ranks add."""
    kept = torch.where(trained_tokens(mask), values.detach(), 0.0).double()
    return torch.stack([trained_tokens(mask).sum().double(), kept.sum(), kept.square().sum()])


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    moments: Tensor | None = None,
    keep_mean: bool = False,
    epsilon: float = 1e-8,
) -> Tensor:
    """Values [sequences, tokens] of trained tokens with mean 0 (or, with `keep_mean`, their own) and variance 1.

    `moments` are the `token_moments` of the whole step; without them those of `values`. 0 where not trained, and mean 0
    alone where the step has fewer than two trained tokens.
    """
    require_shape("values", values, mask)
    values = floats(values)
    number, total, squares = token_moments(values, mask) if moments is None else moments.double()
    mean = total / number.clamp(min=1)
    variance = ((squares - total * mean) / (number - 1).clamp(min=1)).clamp(min=0)
    scale = torch.where(number > 1, torch.rsqrt(variance + epsilon), 1.0)
    white = (values - mean) * scale + (mean if keep_mean else 0.0)
    return torch.where(trained_tokens(mask), white.to(values.dtype), 0.0)
