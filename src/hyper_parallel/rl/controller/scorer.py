"""Rewards of answers: asked for as answers end, from a pool of processes, and taken as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from hyper_parallel.config.rl_task import TaskConfig
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.sample import Sample

Answers = Callable[[Sequence[Prompt]], list[str]]
"""An answer to each prompt, at once: of an evaluation."""
EVALUATION = -1
"""In place of a ticket."""


@dataclass(frozen=True)
class Scored:
    """What came of an answer."""

    ticket: int
    place: int
    reward: float | None
    """None where it failed; of an answer that goes on, that of its turns until now."""
    appended: str | None = None
    """Of an answer that goes on: the text that the policy reads next."""


class Scorer(Protocol):
    """Never waits for a reward."""

    failed: int
    """Rewards that could not be computed, in time or at all."""

    @property
    def pending(self) -> int:
        """Answers whose results are not taken yet."""

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """An answer, or a turn of one, has ended."""

    def results(self, timeout_s: float) -> list[Scored]:
        """Those that are there, after at most so many seconds."""

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """Nothing more is asked about these answers."""

    def all_of(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The rewards of an evaluation. Results of others that arrive meanwhile are kept."""

    def close(self) -> None:
        """End the processes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def scorer_of(task: TaskConfig, folder: Path | None) -> Scorer:
    """The scorer of a task. `folder`: where files are looked for. Raises ConfigError for an unknown name."""
    if task.environment is None:
        return RewardScorer(task, folder)
    from hyper_parallel.rl.controller.environment_scorer import EnvironmentScorer

    return EnvironmentScorer(task, task.environment, folder)


class RewardScorer:
    """By a reward function."""

    def __init__(self, task: TaskConfig, folder: Path | None = None) -> None:
        """As `scorer_of`."""
        self._pool = RewardPool(
            task.reward,
            workers=task.workers,
            time_limit_s=task.time_limit,
            folder=folder,
            options=task.options,
        )
        self._kept: list[Scored] = []
        """Rewards of answers that came while an evaluation was waited for."""
        self._asked = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        """As `Scorer` has it."""
        return self._asked

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """As `Scorer` has it."""
        self._pool.submit((sample.ticket, sample.place), prompt_of(task), sample.text, task)
        self._asked += 1

    def results(self, timeout_s: float) -> list[Scored]:
        """As `Scorer` has it."""
        kept, self._kept = self._kept, []
        if self._asked > len(kept):
            kept += self._arrived(0.0 if kept else timeout_s)
        self._asked -= len(kept)
        return kept

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it: its rewards arrive and are of no use."""

    def all_of(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """As `Scorer` has it."""
        given = answers([prompt_of(row) for row in rows])
        for place, (answer, row) in enumerate(zip(given, rows, strict=True)):
            self._pool.submit((EVALUATION, place), prompt_of(row), answer, row)
        found: dict[int, float | None] = {}
        while len(found) < len(given):
            for one in self._arrived(1.0):
                if one.ticket == EVALUATION:
                    found[one.place] = one.reward
                else:
                    self._kept.append(one)
        return [found[place] for place in range(len(given))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arrived(self, timeout_s: float) -> list[Scored]:
        found = []
        for key, reward in self._pool.results(timeout_s):
            assert isinstance(key, tuple)
            ticket, place = key
            self.failed += reward.failed is not None
            found.append(Scored(ticket, place, reward.value if reward.failed is None else None))
        return found
