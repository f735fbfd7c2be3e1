"""Samples: answers to prompts, with what each of their tokens was drawn by. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
