"""Rewards of answers of several turns, by environments in a pool of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.config.rl_task import TaskConfig
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.scorer import EVALUATION, Answers, Key, Scored, Scorer
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.rl.environments.pool import EnvironmentPool, Reply
from hyper_parallel.rl.sample import Sample


class EnvironmentScorer(Scorer):
    """An episode for each answer: it begins when the first turn has ended."""

    def __init__(self, task: TaskConfig, name: str, folder: Path | None = None) -> None:
        """Raises ConfigError for an unknown environment."""
        super().__init__()
        self._pool = EnvironmentPool(
            name, workers=task.workers, time_limit_s=task.time_limit, folder=folder, options=task.options
        )
        self._first: dict[Key, tuple[Mapping[str, Any], str]] = {}
        """The task and first turn of episodes that are being reset."""
        self._rewards: dict[Key, float] = {}
        """Of the turns until now, of the episodes under way."""

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """As `Scorer` has it. Raises DataError for a prompt that is no text."""
        _text(task)
        super().submit(sample, task)

    def begin_anew(self) -> None:
        """As `Scorer` has it. Episodes that are busy end with their next reply."""
        for key in [key for key in self._rewards if key not in self._asked]:
            self._end(key)
        super().begin_anew()

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it. One that is busy is dropped when its reply has come, which nobody asked for."""
        for place in places:
            key = Key(self._life, ticket, place)
            if key in self._rewards and key not in self._asked:
                self._end(key)

    def all_of(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """As `Scorer` has it, turn by turn of all rows together."""
        texts = {place: _text(row) for place, row in enumerate(rows)}
        found: dict[int, float | None] = {}
        while texts:
            given = dict(zip(texts, answers(list(texts.values())), strict=True))
            for place, answer in given.items():
                self._ask(Key(self._life, EVALUATION, place), rows[place], answer)
            for one in self._of_evaluation(len(given)):
                if one.appended is None:
                    found[one.place] = one.reward
                    del texts[one.place]
                else:
                    texts[one.place] += given[one.place] + one.appended
        return [found[place] for place in range(len(rows))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        if key in self._rewards:
            self._pool.step(key, text)
            return
        self._rewards[key] = 0.0
        self._first[key] = task, text
        self._pool.reset(key, task)

    def _arrived(self, timeout_s: float) -> list[tuple[Key, Scored]]:
        found = []
        for key, reply in self._pool.results(timeout_s):
            assert isinstance(key, Key)
            if key.life != self._life:
                self._first.pop(key, None)
                self._end(key)
            elif (one := self._reply(key, reply)) is not None:
                found.append((key, one))
        return found

    def _reply(self, key: Key, reply: Reply) -> Scored | None:
        """None where the episode's first turn is asked about now."""
        if reply.failed is not None:
            self.failed += 1
            self._first.pop(key, None)
            del self._rewards[key]
            return Scored(key.ticket, key.place, None)
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
            return Scored(key.ticket, key.place, self._rewards[key], reply.turn.text)
        return Scored(key.ticket, key.place, self._rewards.pop(key))

    def _end(self, key: Key) -> None:
        if self._rewards.pop(key, None) is not None:
            self._pool.drop(key)


def _text(row: Mapping[str, Any]) -> str:
    prompt = prompt_of(row)
    if not isinstance(prompt, str):
        raise DataError(
            "task.environment: prompts are texts, and a row has a conversation; write it as a text"
        )
    return prompt
