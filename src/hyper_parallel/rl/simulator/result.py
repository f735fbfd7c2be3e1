"""Result of a simulated loop: time per step, utilization by role, bubble, waste and staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Averages over the measured steps of one simulated loop."""

    kind: str
    """`colocated`, or the order of the queue."""
    rollout_devices: int
    train_devices: int
    staleness: int
    """The bound, in optimizer updates."""
    seconds: float
    """Per step."""
    generating: float
    """Share of the time in which a rollout engine runs answers, averaged over engines."""
    training: float
    """Share of the time in which the actor trains or scores."""
    bubble: float
    """Share of all devices' time in which they do neither."""
    running: float
    """Answers that run on an engine, averaged over the time in which it runs any."""
    tokens: float
    """Tokens trained per step."""
    wasted: float
    """Share of the tokens drawn that were dropped as stale, refused, or lost."""
    stale_groups: float
    """Groups dropped as stale per step."""
    histogram: Mapping[int, int]
    """How many trained groups had each staleness, warm-up included."""

    @property
    def largest_staleness(self) -> int:
        """Of any trained group."""
        return max(self.histogram)

    @property
    def mean_staleness(self) -> float:
        """Of the trained groups."""
        count = sum(self.histogram.values())
        return sum(value * many for value, many in self.histogram.items()) / count

    def to_json(self) -> dict[str, Any]:
        """Plain data, with seconds and shares rounded to what the simulation can mean."""
        return {
            "kind": self.kind,
            "rollout_devices": self.rollout_devices,
            "train_devices": self.train_devices,
            "staleness_bound": self.staleness,
            "seconds_per_step": round(self.seconds, 4),
            "generating": round(self.generating, 4),
            "training": round(self.training, 4),
            "bubble": round(self.bubble, 4),
            "running_per_engine": round(self.running, 2),
            "tokens_per_step": round(self.tokens),
            "wasted_tokens": round(self.wasted, 4),
            "stale_groups_per_step": round(self.stale_groups, 2),
            "mean_staleness": round(self.mean_staleness, 3),
            "staleness": {str(key): value for key, value in self.histogram.items()},
        }
