"""Evaluation: rewards of answers to held-out prompts, drawn at the run's temperature and greedy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.rl.controller.scorer import Scorer
from hyper_parallel.rl.controller.workers import RoleGroup
from hyper_parallel.rl.sample import Prompted, Sample

SEED = 2**31
"""Added to the run's seed: held-out answers are drawn by other numbers than training's."""


@dataclass(frozen=True)
class Accuracy:
    """Mean rewards of held-out prompts; None where none could be computed."""

    sampled: float | None
    greedy: float | None
    prompts: int


def evaluate(
    config: RLConfig, rollout: RoleGroup, rows: Sequence[Mapping[str, Any]], scorer: Scorer, step: int
) -> Accuracy:
    """With the rollout's weights as they are; it is idle, and no reward is pending."""
    sampled = mean_reward(config, rollout, rows, scorer, step, config.rl.temperature)
    return Accuracy(sampled, mean_reward(config, rollout, rows, scorer, step, 0.0), len(rows))


def mean_reward(
    config: RLConfig,
    rollout: RoleGroup,
    rows: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    step: int,
    temperature: float,
) -> float | None:
    """Of one answer to each prompt; None where no reward could be computed. One without a reward counts 0; by a reward
    model, whose scores have no zero that means anything, it does not count."""

    def answers(asked: Sequence[Prompted]) -> list[Sample]:
        found: list[Sample] = rollout.ask(
            step, "answer", asked=asked, temperature=temperature, seed=config.seed + SEED
        )
        return found

    rewards = scorer.all_of(answers, rows, config.rl.max_tokens)
    known = [one for one in rewards if one is not None]
    if not known:
        return None
    if config.task.has_reward_model:
        return statistics.fmean(known)
    return statistics.fmean(reward or 0.0 for reward in rewards)
