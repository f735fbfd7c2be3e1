"""Rewards of answers of several turns, by environments in a pool of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyper_parallel.config.rl_task import TaskConfig
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.scorer import EVALUATION, Answers, Scored
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.rl.environments.pool import EnvironmentPool, Reply
from hyper_parallel.rl.sample import Sample

Key = tuple[int, int]
"""Ticket and place."""


class EnvironmentScorer:
    """An episode for each answer: it begins when the first turn has ended."""

    def __init__(self, task: TaskConfig, name: str, folder: Path | None = None) -> None:
        """Raises ConfigError for an unknown environment."""
        self._pool = EnvironmentPool(
            name, workers=task.workers, time_limit_s=task.time_limit, folder=folder, options=task.options
        )
        self._first: dict[Key, tuple[Mapping[str, Any], str]] = {}
        """The task and first turn of episodes that are being reset."""
        self._rewards: dict[Key, float] = {}
        """Of the turns until now, of the episodes under way."""
        self._kept: list[Scored] = []
        self._asked = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        """As `Scorer` has it."""
        return self._asked

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """As `Scorer` has it. Raises DataError for a prompt that is no text."""
        self._turn((sample.ticket, sample.place), task, sample.text)
        self._asked += 1

    def results(self, timeout_s: float) -> list[Scored]:
        """As `Scorer` has it."""
        kept, self._kept = self._kept, []
        if self._asked > len(kept):
            kept += self._arrived(0.0 if kept else timeout_s)
        self._asked -= len(kept)
        return kept

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it."""
        for place in places:
            if (ticket, place) in self._rewards and (ticket, place) not in self._first:
                del self._rewards[ticket, place]
                self._pool.drop((ticket, place))

    def all_of(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """As `Scorer` has it, turn by turn of all rows together."""
        texts = {place: _text(row) for place, row in enumerate(rows)}
        found: dict[int, float | None] = {}
        while texts:
            given = dict(zip(texts, answers(list(texts.values())), strict=True))
            for place, answer in given.items():
                self._turn((EVALUATION, place), rows[place], answer)
            left = len(given)
            while left:
                for one in self._arrived(1.0):
                    if one.ticket != EVALUATION:
                        self._kept.append(one)
                        continue
                    left -= 1
                    if one.appended is None:
                        found[one.place] = one.reward
                        del texts[one.place]
                    else:
                        texts[one.place] += given[one.place] + one.appended
        return [found[place] for place in range(len(rows))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _turn(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        if key in self._rewards:
            self._pool.step(key, text)
            return
        _text(task)
        self._rewards[key] = 0.0
        self._first[key] = task, text
        self._pool.reset(key, task)

    def _arrived(self, timeout_s: float) -> list[Scored]:
        found = []
        for key, reply in self._pool.results(timeout_s):
            assert isinstance(key, tuple)
            if (one := self._reply(key, reply)) is not None:
                found.append(one)
        return found

    def _reply(self, key: Key, reply: Reply) -> Scored | None:
        if reply.failed is not None:
            self.failed += 1
            self._first.pop(key, None)
            del self._rewards[key]
            return Scored(*key, None)
        if reply.turn is None:
            task, text = self._first.pop(key)
            if reply.prompt != task["prompt"]:
                raise DataError(
                    f"the environment begins with {reply.prompt!r:.80}, and the row's prompt is "
                    f"{task['prompt']!r:.80}; give the row's own prompt in reset"
                )
            self._pool.step(key, text)
            return None
        self._rewards[key] += reply.turn.reward
        if not reply.turn.done:
            return Scored(*key, self._rewards[key], reply.turn.text)
        return Scored(*key, self._rewards.pop(key))


def _text(row: Mapping[str, Any]) -> str:
    prompt = prompt_of(row)
    if not isinstance(prompt, str):
        raise DataError(
            "task.environment: prompts are texts, and a row has a conversation; write it as a text"
        )
    return prompt
