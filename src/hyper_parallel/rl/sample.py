"""A sample: one answer to a prompt, with what each of its tokens was drawn by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer. The lists have an entry for each token of the answer, the token that ended it included."""

    ticket: int
    """Of its group: all answers to one prompt."""
    place: int
    """In its group."""
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
    reward: float | None = None
    """None until it is known, and where it failed."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The row of the task."""

    @property
    def oldest(self) -> int:
        """The version of its oldest token."""
        return min(version for version, own in zip(self.versions, self.drawn, strict=True) if own)
