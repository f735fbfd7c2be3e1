"""Rewards of answers, from the pool of reward processes: asked for as answers end, taken as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyper_parallel.config.rl_task import TaskConfig
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.sample import Sample

_EVALUATION = -1
"""In place of a ticket."""


class Scorer:
    """Never waits for a reward; one that fails is None."""

    def __init__(self, task: TaskConfig, folder: Path | None = None) -> None:
        """`folder`: where a reward's file is looked for. Raises ConfigError for an unknown reward."""
        self._pool = RewardPool(
            task.reward,
            workers=task.workers,
            time_limit_s=task.time_limit,
            folder=folder,
            options=task.options,
        )
        self._kept: list[tuple[int, int, float | None]] = []
        """Rewards of answers that came while an evaluation was waited for."""
        self.pending = 0
        """Rewards that are not there yet."""
        self.failed = 0
        """Rewards that could not be computed, in time or at all."""
        self.reasons: list[str] = []
        """Why, the first few."""

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """Ask for the reward of an answer."""
        self._pool.submit((sample.ticket, sample.place), prompt_of(task), sample.text, task)
        self.pending += 1

    def results(self, timeout_s: float) -> list[tuple[int, int, float | None]]:
        """Ticket, place and reward of what is there, after at most so many seconds."""
        kept, self._kept = self._kept, []
        if self.pending > len(kept):
            kept += self._arrived(0.0 if kept else timeout_s)
        self.pending -= len(kept)
        return kept

    def all_of(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The rewards of an evaluation's answers. Others that arrive meanwhile are kept."""
        for place, (answer, row) in enumerate(zip(answers, rows, strict=True)):
            self._pool.submit((_EVALUATION, place), prompt_of(row), answer, row)
        found: dict[int, float | None] = {}
        while len(found) < len(answers):
            for ticket, place, reward in self._arrived(1.0):
                if ticket == _EVALUATION:
                    found[place] = reward
                else:
                    self._kept.append((ticket, place, reward))
        return [found[place] for place in range(len(answers))]

    def _arrived(self, timeout_s: float) -> list[tuple[int, int, float | None]]:
        found = []
        for key, reward in self._pool.results(timeout_s):
            assert isinstance(key, tuple)
            if reward.failed is not None:
                self.failed += 1
                if len(self.reasons) < 5:
                    self.reasons.append(reward.failed)
            found.append((*key, reward.value if reward.failed is None else None))
        return found

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
