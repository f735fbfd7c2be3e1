"""Advantages of groups, GAE, whitening and the rules of groups, beside plain loops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.advantages import (
    gae,
    group_advantages,
    leave_one_out_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    token_moments,
    token_rewards,
    whiten,
    without_variance,
)
from hyper_parallel.rl.sample import groups_without_variance, has_reward_variance

SEEDS = st.integers(0, 100_000)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mask(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.6


@given(seed=SEEDS, scale=st.sampled_from(["group", "batch", "none"]))
@settings(max_examples=25)
def test_advantages_of_each_group_sum_to_0(seed: int, scale: str) -> None:
    rewards = _normal(seed, 5, 4)
    advantages = group_advantages(rewards, scale=scale)
    assert advantages.sum(1).abs().max() < 1e-9
    assert torch.equal(advantages.argsort(1), rewards.argsort(1))
    assert leave_one_out_advantages(rewards).sum(1).abs().max() < 1e-9


def test_scales() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 4.0]])
    assert torch.equal(group_advantages(rewards, scale="none"), torch.tensor([[-0.5, 0.5], [-2.0, 2.0]]))
    group = group_advantages(rewards, epsilon=0.0)
    torch.testing.assert_close(group.abs(), torch.full((2, 2), 0.5**0.5))
    batch = group_advantages(rewards, scale="batch", epsilon=0.0)
    torch.testing.assert_close(batch * rewards.std(), group_advantages(rewards, scale="none"))
    assert torch.equal(leave_one_out_advantages(rewards), torch.tensor([[-1.0, 1.0], [-4.0, 4.0]]))
    with pytest.raises(ConfigError, match="one of group, batch, none"):
        group_advantages(rewards, scale="std")
    with pytest.raises(ConfigError, match=r"need \[prompts, answers"):
        group_advantages(rewards[0])


def test_a_group_of_equal_rewards_has_advantages_of_exactly_0() -> None:
    """In float32 neither the mean of seven times 0.1 nor that of six times 0.3 need be that number."""
    rewards = torch.tensor([0.1, 0.3, 0.7, 0.9])[:, None].expand(4, 7).contiguous()
    assert (rewards - rewards.mean(1, keepdim=True)).any()
    assert (rewards - (rewards.sum(1, keepdim=True) - rewards) / 6).any()
    assert not group_advantages(rewards).any()
    assert not leave_one_out_advantages(rewards).any()
    assert without_variance(torch.tensor([[1.0, 1.0], [1.0, 2.0], [torch.nan, 2.0]])).tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_an_answer_without_a_reward_counts_for_nothing(advantages: object) -> None:
    assert callable(advantages)
    rewards = torch.tensor(
        [[1.0, torch.nan, 3.0, 8.0], [torch.nan, 2.0, torch.nan, torch.nan], [torch.nan] * 4]
    )
    found = advantages(rewards)
    torch.testing.assert_close(found[0, [0, 2, 3]], advantages(torch.tensor([[1.0, 3.0, 8.0]]))[0])
    assert found[0, 1] == 0
    assert not found[1:].any()


def _plain_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, last: float
) -> list[float]:
    """As a sum: A_t = Σ_k (γλ)^k δ_{t+k} over the trained tokens alone."""
    places = [place for place, here in enumerate(mask) if here]
    after = ([values[place] for place in places] + [last])[1:]
    deltas = [rewards[p] + gamma * follow - values[p] for p, follow in zip(places, after, strict=True)]
    found = [0.0] * len(mask)
    for index, place in enumerate(places):
        found[place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[index:]))
    return found


@given(seed=SEEDS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
@settings(max_examples=25)
def test_gae_is_a_plain_loop_over_trained_tokens(seed: int, gamma: float, lam: float) -> None:
    rewards, values, last = _normal(seed, 4, 7), _normal(seed + 2, 4, 7), _normal(seed + 3, 4)
    mask = _mask(seed, 4, 7)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, last_values=last)
    for row in range(4):
        plain = _plain_gae(
            rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam, float(last[row])
        )
        torch.testing.assert_close(advantages[row], torch.tensor(plain, dtype=torch.float64))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


def test_token_rewards_put_the_score_at_the_last_trained_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    kl = torch.full((3, 4), 2.0)
    found = token_rewards(torch.tensor([5.0, 7.0, 9.0]), mask, kl, 0.5)
    assert found.tolist() == [[-1.0, 4.0, 0.0, 0.0], [0.0, -1.0, 0.0, 6.0], [0.0, 0.0, 0.0, 0.0]]


@given(seed=SEEDS, keep_mean=st.booleans())
@settings(max_examples=25)
def test_whitened_values_of_two_ranks_are_those_of_the_whole_batch(seed: int, keep_mean: bool) -> None:
    values, mask = 3 + 2 * _normal(seed, 6, 5), _mask(seed, 6, 5)
    mask[0, :2] = True
    whole = whiten(values, mask, keep_mean=keep_mean)
    moments = token_moments(values[:2], mask[:2]) + token_moments(values[2:], mask[2:])
    parts = [
        whiten(values[rows], mask[rows], moments=moments, keep_mean=keep_mean)
        for rows in (slice(2), slice(2, 6))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not whole[~mask].any()
    expected = values[mask].mean() if keep_mean else 0.0
    assert float(whole[mask].mean() - expected) == pytest.approx(0, abs=1e-9)
    assert float(whole[mask].std()) == pytest.approx(1, abs=1e-6)


def test_whitening_one_token_takes_only_its_mean() -> None:
    mask = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[3.0, 9.0]]), mask).tolist() == [[0.0, 0.0]]


def test_reinforce_pp() -> None:
    """Rewards of tokens add up to the end of the answer, discounted; then the mean and the scale of the batch."""
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    sums = torch.tensor([1 + 1 + 1.0, 2 + 2.0, 4.0, 3 + 2.5, 5.0])
    white = (sums - sums.mean()) / sums.std()
    found = reinforce_pp_advantages(rewards, mask, gamma=0.5)
    torch.testing.assert_close(found[mask == 1], white)
    assert found[1, 2] == 0


def test_reinforce_pp_with_a_baseline() -> None:
    rewards = torch.tensor([[0.0, 2.0], [5.0, torch.nan]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]])
    found = reinforce_pp_baseline_advantages(rewards, mask)
    tokens = torch.tensor([-1.0, 1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(found[:3][mask[:3] == 1], (tokens - tokens.mean()) / tokens.std())
    assert not found[3].any(), "no reward, no advantage"
    with pytest.raises(ConfigError, match="need 4, a row for each"):
        reinforce_pp_baseline_advantages(rewards, mask[:3])


def test_groups_that_teach_nothing() -> None:
    assert not has_reward_variance([1.0, 1.0, 1.0])
    assert has_reward_variance([1.0, 0.0])
    assert not has_reward_variance([1.0, None, float("nan")])
    assert groups_without_variance([[1.0, 1.0], [0.0, 1.0], [None, 2.0], []]) == 3


def test_rules_of_groups_need_no_torch() -> None:
    """The controller, which has no torch, uses them."""
    code = "import sys, hyper_parallel.rl.sample; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
