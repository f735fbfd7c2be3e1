"""Advantages of whole answers from the rewards of their groups (GRPO, RLOO, REINFORCE++).

With r_pg the reward of answer g to prompt p, in groups of G:

    group            (r_pg − mean_g r_pg) / (s + ε)     `group_advantages`; DeepSeekMath (arXiv 2402.03300), section
                                                        4.1.2; s is the std of the group or of the batch, or, as in Dr.
                                                        GRPO (arXiv 2503.20783), section 3, nothing is divided
    leave one out    r_pg − Σ_{h≠g} r_ph / (G − 1)      `leave_one_out_advantages`; RLOO (arXiv 2402.14740), section 2
    REINFORCE++      white(Σ_{u≥t} γ^{u−t} r_u)         `reinforce_pp_advantages`; arXiv 2501.03262, section 3
    with a baseline  white(r_pg − mean_g r_pg)          `reinforce_pp_baseline_advantages`; the same, section 3

Standard deviations are unbiased (over n − 1), as in TRL; "white" subtracts the mean and divides by the standard
deviation of all trained tokens of the batch. An answer whose reward is NaN (none could be given) is left out of every
mean, and its advantage is 0. Where all rewards of a group are the same the advantage is exactly 0: the rounding of the
mean, divided by ε, would otherwise be a gradient, and Adam scales a small gradient up.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.reductions import floats, require_shape, trained_tokens

Scale = Literal["group", "batch", "none"]


def group_advantages(rewards: Tensor, *, scale: Scale = "group", epsilon: float = 1e-4) -> Tensor:
    """Rewards [prompts, group] less their group's mean, over a standard deviation plus `epsilon`: [prompts, group].

    Raises ConfigError for an unknown scale, and for rewards that are not of two dimensions.
    """
    if scale not in get_args(Scale):
        raise ConfigError(f"got scale {scale!r} of advantages; need one of {', '.join(get_args(Scale))}")
    rewards = _grouped(rewards)
    mean, std = _moments(rewards, dim=1)
    centred = rewards - mean
    if scale == "batch":
        _, std = _moments(rewards.reshape(1, -1), dim=1)
    advantages = centred if scale == "none" else centred / (std + epsilon)
    return _cleared(advantages, without_variance(rewards))


def leave_one_out_advantages(rewards: Tensor, *, normalize: bool = False, epsilon: float = 1e-4) -> Tensor:
    """Rewards [prompts, group] less the mean of the other answers of their group: [prompts, group].

    `normalize` subtracts the mean of the batch's advantages and divides by their standard deviation plus `epsilon`.
    """
    rewards = _grouped(rewards)
    known = ~torch.isnan(rewards)
    others = known.sum(1, keepdim=True) - 1
    advantages = rewards - (torch.nansum(rewards, 1, keepdim=True) - rewards) / others
    advantages = torch.where(without_variance(rewards)[:, None] & known & (others > 0), 0.0, advantages)
    if normalize:
        mean, std = _moments(advantages.reshape(1, -1), dim=1)
        advantages = (advantages - mean) / (std + epsilon)
    return torch.nan_to_num(advantages, nan=0.0)


def reinforce_pp_advantages(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Whitened discounted sums of the rewards of tokens [sequences, tokens]: the same shape, 0 where not trained.

    `token_rewards` has the KL penalty of each token and the score of the answer at its last one (the function
    `token_rewards`). The batch is the whole step's: on several ranks, call `gae` with values of 0 and
    `whiten` with the sum of the ranks' moments.
    """
    returns, _ = gae(token_rewards, torch.zeros_like(floats(token_rewards)), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask)


def reinforce_pp_baseline_advantages(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards [prompts, group] less their group's mean, whitened over the trained tokens of all answers.

    `mask` [prompts · group, tokens] has the answers in the order of the groups. Returns [prompts · group, tokens], 0
    where not trained. Raises ConfigError where the rows of the mask are not the rewards.
    """
    centred = group_advantages(rewards, scale="none").reshape(-1, 1)
    if mask.shape[0] != centred.shape[0]:
        raise ConfigError(
            f"got a mask of {mask.shape[0]} answers; need {centred.shape[0]}, a row for each of the rewards"
        )
    trained = trained_tokens(mask) & ~torch.isnan(rewards).reshape(-1, 1)
    return whiten(centred.expand(mask.shape), trained)


def without_variance(rewards: Tensor) -> Tensor:
    """Which groups of rewards [prompts, group] have no two different ones, NaN left out: [prompts], bool."""
    known = ~torch.isnan(rewards)
    highest = torch.where(known, rewards, -torch.inf).amax(1)
    lowest = torch.where(known, rewards, torch.inf).amin(1)
    return highest <= lowest


def _grouped(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2:
        raise ConfigError(
            f"got rewards of shape {list(rewards.shape)}; need [prompts, answers of each group]"
        )
    return floats(rewards)


def _cleared(advantages: Tensor, constant: Tensor) -> Tensor:
    """0 for the groups without variance, and for what is not known."""
    return torch.nan_to_num(torch.where(constant[:, None], 0.0, advantages), nan=0.0)


def _moments(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of what is not NaN; NaN where there is too little of it."""
    known = ~torch.isnan(values)
    number = known.sum(dim, keepdim=True)
    mean = torch.nansum(values, dim, keepdim=True) / number
    squares = torch.where(known, values - mean, 0.0).square().sum(dim, keepdim=True)
    return mean, (squares / (number - 1)).sqrt()


# Generalized advantage estimation over the tokens of answers, their rewards, and whitening (PPO).
#
# GAE (arXiv 1506.02438, section 3), with r_t the reward and V_t the value of trained token t, and t+ the next one:
#
#     δ_t = r_t + γ V_{t+} − V_t        A_t = δ_t + γ λ A_{t+}        R_t = A_t + V_t
#
# The recursion steps over tokens that are not trained (the text of an environment, padding): nothing is discounted
# there.
#
# Rewards of tokens (InstructGPT, arXiv 2203.02155, equation 2): r_t = −β KL_t, and the answer's score at its last
# trained token. Whitening: (x − mean) / sqrt(variance + 1e-8), of the trained tokens, with the unbiased variance, as in
# TRL.


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
