"""The report of a batch: the metrics that trackers keep."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.rl.losses.groups import groups_without_variance
from hyper_parallel.rl.queue import Counters
from hyper_parallel.rl.sample import Sample

WIDE_GAP = 0.1
"""Nats per token between the log-probabilities of rollout and trainer above which runs were seen to fall apart."""


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One trained batch."""

    step: int
    samples: Sequence[Sample]
    metrics: Mapping[str, float]
    """The actor's."""
    staleness: Sequence[int]
    """Of each sample, in optimizer updates."""
    train_s: float
    group: int
    counters: Counters
    """Of the run until now."""
    failed_rewards: int
    """Of the run until now."""

    @property
    def reward(self) -> float | None:
        """The mean of those that are known; None where none is."""
        known = [one.reward for one in self.samples if one.reward is not None]
        return statistics.fmean(known) if known else None

    def record(self) -> dict[str, float]:
        """Numbers by name."""
        rewards = [one.reward for one in self.samples]
        groups = [rewards[at : at + self.group] for at in range(0, len(rewards), self.group)]
        lengths = [len(one.tokens) for one in self.samples]
        histogram = Counter(self.staleness)
        return {
            **({"reward": self.reward} if self.reward is not None else {}),
            "groups_without_variance": float(groups_without_variance(groups)),
            "response_length": statistics.fmean(lengths),
            "response_length_max": float(max(lengths)),
            "cut_answers": sum(not one.ended for one in self.samples) / len(self.samples),
            "staleness_mean": statistics.fmean(self.staleness),
            "staleness_max": float(max(self.staleness)),
            **{f"staleness_{key}": float(count) for key, count in sorted(histogram.items())},
            "wasted_share": self.counters.wasted_share,
            "failed_rewards": float(self.failed_rewards),
            "train_s": self.train_s,
            **self.metrics,
        }
