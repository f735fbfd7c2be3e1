"""Samples: answers to prompts with what each token was drawn by, their groups, and which groups teach something.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Appended = str | Mapping[str, Any]
"""What an environment puts behind an answer: a text, or in a conversation a message."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer. The lists have an entry for each token of the answer, the token that ended it included."""

    ticket: int
    place: int
    row: int
    """As the prompt's."""
    prompt: tuple[int, ...]
    """Token ids."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithms of the probabilities with which the rollout drew them; 0 where it did not."""
    versions: tuple[int, ...]
    """Of the weights that drew them: the number of optimizer updates before."""
    drawn: tuple[bool, ...]
    """Whether the policy drew them: not the text that an environment appends."""
    ended: bool
    """By a token that ends answers; else it was cut at its longest length."""
    text: str = ""
    """Of the answer; of several turns, of the last one."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Of a conversation: the messages between the prompt and the last turn."""
    reward: float | None = None
    """None until it is known, and where it failed."""
    failed: str | None = None
    """Why its reward failed."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The row of the task."""

    @property
    def oldest(self) -> int:
        """The version of its oldest token."""
        return min(version for version, own in zip(self.versions, self.drawn, strict=True) if own)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `dataclasses.asdict`, from JSON, which has lists in place of tuples."""
        lists: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**lists)


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """One answer that a rollout is asked for."""

    ticket: int
    """Of its group: all answers to one prompt."""
    place: int
    """In its group."""
    row: int
    """Of the run's prompts, counted without end: token i is drawn by a function of (seed, row, place, i)."""
    prompt: str | Sequence[Mapping[str, Any]]
    """Text, or the messages of a conversation."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template gets beside the messages."""
    before: Sample | None = None
    """The answer until now, which goes on behind `appended`: what the environment says and the policy reads."""
    appended: Appended = ""


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


# Which groups of answers teach something (DAPO's rule of sampling).
#
# DAPO (arXiv 2503.14476): dynamic sampling keeps a prompt whose answers are neither all right nor all wrong (equation
# 11), because a group without reward variance has no advantage and no gradient: `has_reward_variance`.
#
# No torch: a controller decides by these which samples are trained.


def has_reward_variance(rewards: Sequence[float | None], tolerance: float = 1e-8) -> bool:
    """Whether the rewards of one group differ by more than `tolerance`; None and NaN (no reward) are left out."""
    known = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return bool(known) and max(known) - min(known) > tolerance


def groups_without_variance(groups: Iterable[Sequence[float | None]]) -> int:
    """The number of groups whose rewards are all the same: their answers train nothing."""
    return sum(not has_reward_variance(rewards) for rewards in groups)
