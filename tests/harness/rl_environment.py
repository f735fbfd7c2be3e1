"""An environment of two turns for answers of a model without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.rl.environments import Turn


class TwoTurns:
    """Appends `0=` after the first turn; the rewards of both turns add."""

    first = Turn(text="0=")

    def __init__(self) -> None:
        self._task: Mapping[str, Any] = {}
        self._turns = 0

    def reset(self, task: Mapping[str, Any]) -> Any:
        self._task, self._turns = task, 0
        return task["prompt"]

    def step(self, answer: str) -> Turn:
        self._turns += 1
        right = set(self._task["answer"])
        reward = sum(letter in right for letter in set(answer)) / len(right)
        return replace(self.first, reward=reward, done=self._turns == 2)


class TwoMessages(TwoTurns):
    """Says it as a tool."""

    first = Turn(message={"role": "tool", "content": "0="})
