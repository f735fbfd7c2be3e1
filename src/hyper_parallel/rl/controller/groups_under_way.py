"""Groups of answers under way: from the prompt's start to the rewards of all its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.rl.sample import Sample


@dataclass
class AnswerGroup:
    """All answers to one prompt."""

    ticket: int
    row: int
    task: Mapping[str, Any]
    rollout: str
    """The group of workers that generates them."""
    size: int
    samples: dict[int, Sample] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)

    def add(self, sample: Sample) -> None:
        """An answer has ended."""
        self.samples[sample.place] = replace(sample, task=self.task)

    def score(self, place: int, reward: float | None, failed: str | None = None) -> None:
        """The reward of an answer; None where it failed, and why."""
        self.samples[place] = replace(self.samples[place], reward=reward, failed=failed)
        self.scored.add(place)

    @property
    def complete(self) -> bool:
        """Whether all answers have ended and were scored."""
        return len(self.scored) == self.size

    @property
    def in_order(self) -> list[Sample]:
        """The answers."""
        return [self.samples[place] for place in sorted(self.samples)]

    @property
    def tokens(self) -> int:
        """That were drawn, of answers that have ended."""
        return sum(len(one.tokens) for one in self.samples.values())

    @property
    def oldest(self) -> int:
        """The oldest version of a token."""
        return min(one.oldest for one in self.samples.values())

    @property
    def rewards(self) -> list[float | None]:
        """In order."""
        return [one.reward for one in self.in_order]
