"""A reward that answers of a model without training differ in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def share(prompt: str, answer: str, task: Mapping[str, Any]) -> float:
    """Of the digits that the right answer has, too, at their places or not; longer answers lose a little."""
    right = set(task["answer"])
    return sum(letter in right for letter in set(answer)) / len(right) - 0.01 * len(answer)
