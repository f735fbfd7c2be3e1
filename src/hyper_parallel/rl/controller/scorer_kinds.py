"""Scorers by a reward function, by a reward model, and by an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyper_parallel.config.rl import RLConfig, RLTraining, TaskConfig
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.scorer import EVALUATION, Answers, Key, Scored, Scorer, first_turns
from hyper_parallel.rl.controller.workers import RoleGroup
from hyper_parallel.rl.environment_pool import EnvironmentPool, Reply
from hyper_parallel.rl.environments import Turn, prompt_of
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.sample import Appended


def scorer_of(config: RLConfig, folder: Path | None) -> Scorer:
    """The scorer of a run. `folder`: where files are looked for. Raises ConfigError for an unknown name."""
    task = config.task
    if task.has_reward_model:
        return ModelScorer(config.rl, task.max_failed)
    if task.environment is None:
        return RewardScorer(task, folder)
    return EnvironmentScorer(task, task.environment, folder)


class RewardScorer(Scorer):
    """By a reward function."""

    def __init__(self, task: TaskConfig, folder: Path | None = None) -> None:
        """As `scorer_of`."""
        super().__init__(task.max_failed)
        self._prompts: dict[Key, Prompt] = {}
        """Of what the pool was asked."""
        self._pool = RewardPool(
            task.reward,
            workers=task.workers,
            time_limit_s=task.time_limit,
            folder=folder,
            options=task.options,
        )

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it: its rewards arrive and are of no use."""

    def all_of(
        self, answers: Answers, rows: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[float | None]:
        """As `Scorer` has it."""
        given = answers(first_turns(rows))
        for place, (answer, row) in enumerate(zip(given, rows, strict=True)):
            self._ask(Key(self._life, EVALUATION, place), row, answer.text)
        found = {one.place: one.reward for one in self._of_evaluation(len(rows))}
        return [found[place] for place in range(len(rows))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        self._prompts[key] = prompt_of(task)
        self._pool.submit(key, self._prompts[key], text, task)

    def _arrived(self, timeout_s: float) -> list[tuple[Key, Scored]]:
        found = []
        for key, reward in self._pool.results(timeout_s):
            assert isinstance(key, Key)
            prompt = self._prompts.pop(key)
            if reward.failed is not None:
                self._failure(reward.failed, prompt)
            value = reward.value if reward.failed is None else None
            found.append((key, Scored(key.ticket, key.place, value, failed=reward.failed)))
        return found


# Rewards by a reward model: answers wait here until its group of workers has time for them.
#
# The controller takes what waits, sends it with a list of its own, and gives back the scores. In a synchronous run the
# answers to a prompt wait for each other and are scored together, so that scores, whose last bits depend on what is
# computed in the same forward pass, do not depend on when which answer ended. Otherwise what waits is scored together.

_Asked = tuple[Key, Prompt, str]
_NO_SCORE = "the answer is longer than the reward model's max_length, or its score is not finite"


class ModelScorer(Scorer):
    """Asks a group that has the role `reward`."""

    MEND = "raise roles.reward.max_length, or lower rl.max_tokens"

    def __init__(self, rl: RLTraining, max_failed: float) -> None:
        super().__init__(max_failed)
        self._size, self._in_groups = rl.group, rl.staleness == 0
        self._group: RoleGroup | None = None
        self._waiting: list[_Asked] = []
        self._sent: list[list[_Asked]] = []
        """What the group was asked, in its order."""

    def attach(self, group: RoleGroup) -> None:
        """The group of workers that scores."""
        self._group = group

    @property
    def waiting(self) -> int:
        """Answers that the group can be asked about now."""
        return sum(len(one) for one in self._ready())

    def take(self) -> list[list[tuple[Prompt, str]]]:
        """All of them, as `RoleHost.reward` takes them."""
        assert not self._sent, "one list at a time"
        self._sent = self._ready()
        taken = {id(one) for group in self._sent for one in group}
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        return [[(prompt, text) for _, prompt, text in group] for group in self._sent]

    def give(self, scores: Sequence[Sequence[float | None]]) -> list[Scored]:
        """What the group answered to `take`."""
        sent, self._sent = self._sent, []
        found = []
        for asked, values in zip(sent, scores, strict=True):
            for (key, prompt, _), value in zip(asked, values, strict=True):
                if key not in self._asked:
                    continue  # of before a resume
                self._asked.discard(key)
                failed = _NO_SCORE if value is None else None
                if failed is not None:
                    self._failure(failed, prompt)
                found.append(Scored(key.ticket, key.place, value, failed=failed))
        return found

    def ask_again(self) -> None:
        """The group was lost with what it was asked."""
        self._waiting = [one for group in self._sent for one in group] + self._waiting
        self._sent = []

    def begin_anew(self) -> None:
        """As `Scorer` has it."""
        self._waiting.clear()
        self._sent.clear()
        super().begin_anew()

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it. What the group was asked arrives and is of no use."""
        gone = {Key(self._life, ticket, place) for place in places}
        self._asked -= {one[0] for one in self._waiting if one[0] in gone}
        self._waiting = [one for one in self._waiting if one[0] not in gone]

    def all_of(
        self, answers: Answers, rows: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[float | None]:
        """As `Scorer` has it. Raises GroupError where workers were lost."""
        assert self._group is not None
        first = first_turns(rows)
        asked = [(one.prompt, given.text) for one, given in zip(first, answers(first), strict=True)]
        [found] = self._group.ask(self._group.step, "reward", groups=[asked])
        for (prompt, _), score in zip(asked, found, strict=True):
            if score is None:
                self._failure(_NO_SCORE, prompt)
        return list(found)

    def close(self) -> None:
        """The group is ended by whoever started it."""

    def _ready(self) -> list[list[_Asked]]:
        if not self._in_groups:
            return [list(self._waiting)] if self._waiting else []
        tickets: dict[int, list[_Asked]] = {}
        for one in self._waiting:
            tickets.setdefault(one[0].ticket, []).append(one)
        return [
            sorted(group, key=lambda one: one[0].place)
            for group in tickets.values()
            if len(group) == self._size
        ]

    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        self._waiting.append((key, prompt_of(task), text))

    def _arrived(self, timeout_s: float) -> list[tuple[Key, Scored]]:
        return []  # `give` gives them at once


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
