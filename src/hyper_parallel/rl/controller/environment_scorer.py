"""Rewards of answers of several turns, by environments in a pool of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyper_parallel.config.rl_task import TaskConfig
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.scorer import EVALUATION, Answers, Key, Scored, Scorer, first_turns
from hyper_parallel.rl.environments.environment import Turn, prompt_of
from hyper_parallel.rl.environments.pool import EnvironmentPool, Reply
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.sample import Appended


class EnvironmentScorer(Scorer):
    """An episode for each answer: it begins when the first turn has ended."""

    def __init__(self, task: TaskConfig, name: str, folder: Path | None = None) -> None:
        """Raises ConfigError for an unknown environment."""
        super().__init__(task.max_failed)
        self._pool = EnvironmentPool(
            name, workers=task.workers, time_limit_s=task.time_limit, folder=folder, options=task.options
        )
        self._first: dict[Key, tuple[Mapping[str, Any], str]] = {}
        """The task and first turn of episodes that are being reset."""
        self._prompts: dict[Key, Prompt] = {}
        self._rewards: dict[Key, float] = {}
        """Of the turns until now, of the episodes under way."""

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

    def all_of(
        self, answers: Answers, rows: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[float | None]:
        """As `Scorer` has it, turn by turn of all rows together."""
        asked = dict(enumerate(first_turns(rows)))
        found: dict[int, float | None] = {}
        while asked:
            given = dict(zip(asked, answers(list(asked.values())), strict=True))
            for place, answer in given.items():
                self._ask(Key(self._life, EVALUATION, place), rows[place], answer.text)
            for one in self._of_evaluation(len(given)):
                answer, place = given[one.place], one.place
                if one.appended is not None and len(answer.tokens) < max_tokens:
                    asked[place] = replace(asked[place], before=answer, appended=one.appended)
                    continue
                self._end(Key(self._life, EVALUATION, place))
                found[place] = one.reward
                del asked[place]
        return [found[place] for place in range(len(rows))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        if key in self._rewards:
            self._pool.step(key, text)
            return
        self._rewards[key] = 0.0
        self._prompts[key] = prompt_of(task)
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
            self._failure(reply.failed, self._prompts.pop(key))
            self._first.pop(key, None)
            del self._rewards[key]
            return Scored(key.ticket, key.place, None, failed=reply.failed)
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
            appended = _appended(self._prompts[key], reply.turn)
            return Scored(key.ticket, key.place, self._rewards[key], appended)
        del self._prompts[key]
        return Scored(key.ticket, key.place, self._rewards.pop(key))

    def _end(self, key: Key) -> None:
        if self._rewards.pop(key, None) is not None:
            del self._prompts[key]
            self._pool.drop(key)


def _appended(prompt: Prompt, turn: Turn) -> Appended:
    """What the policy reads next. Raises DataError for a message behind a text."""
    if not isinstance(prompt, str):
        return turn.message or {"role": "user", "content": turn.text}
    if turn.message is not None:
        raise DataError(
            f"the environment gives a message of the role {turn.message['role']!r}, and the row's prompt is a text; "
            "write the prompt as a list of messages, or give a text"
        )
    return turn.text
