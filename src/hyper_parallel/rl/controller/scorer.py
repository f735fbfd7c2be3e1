"""Scorers: rewards of answers by a reward function or a reward model, asked for as answers end; evaluation."""

from __future__ import annotations

import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from hyper_parallel.config.rl import RLConfig, RLTraining, TaskConfig
from hyper_parallel.errors import RewardError
from hyper_parallel.rl.controller.workers import RoleGroup
from hyper_parallel.rl.environments import prompt_fields, prompt_of
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.sample import Appended, Prompted, Sample

Answers = Callable[[Sequence[Prompted]], list[Sample]]
"""An answer to each prompt, or its next turn, at once: of an evaluation."""
EVALUATION = -1
"""In place of a ticket."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """An answer. Tickets are given again after a resume: `life` counts these."""

    life: int
    ticket: int
    place: int


@dataclass(frozen=True)
class Scored:
    """What came of an answer."""

    ticket: int
    place: int
    reward: float | None
    """None where it failed; of an answer that goes on, that of its turns until now."""
    appended: Appended | None = None
    """Of an answer that goes on: what the policy reads next."""
    failed: str | None = None
    """Why there is no reward."""


class Scorer(ABC):
    """Never waits for a reward. A context manager: its processes end with it."""

    MEND: ClassVar = "mend the reward, or let it return a number for such answers"
    """What helps where rewards fail."""

    def __init__(self, max_failed: float) -> None:
        """`max_failed`: `task.max_failed`."""
        self._max_failed = max_failed
        self._reason = ""
        """Of the last reward that failed."""
        self._warned = False
        self.failed = 0
        """Rewards that could not be computed, in time or at all."""
        self._life = 0
        self._asked: set[Key] = set()
        """Answers whose results have not come."""
        self._kept: list[Scored] = []
        """Results that came while an evaluation was waited for."""

    @property
    def pending(self) -> int:
        """Answers whose results are not taken yet."""
        return len(self._asked) + len(self._kept)

    def submit(self, sample: Sample, task: Mapping[str, Any]) -> None:
        """An answer, or a turn of one, has ended."""
        key = Key(self._life, sample.ticket, sample.place)
        self._asked.add(key)
        self._ask(key, task, sample.text)

    def results(self, timeout_s: float) -> list[Scored]:
        """Those that are there, after at most so many seconds."""
        kept, self._kept = self._kept, []
        if self._asked:
            kept += self._taken(0.0 if kept else timeout_s)
        return kept

    def begin_anew(self) -> None:
        """Nothing more is asked about any answer until now; the same tickets may come again."""
        self._life += 1
        self._asked.clear()
        self._kept.clear()

    def check(self, rewards: Sequence[float | None]) -> None:
        """Raise RewardError where rewards of a batch failed: all, or more than `task.max_failed`."""
        failed, size = list(rewards).count(None), len(rewards)
        if failed and (failed == size or failed > self._max_failed * size):
            raise RewardError(
                f"{failed} of {size} rewards could not be computed (task.max_failed: {self._max_failed:g}), and for "
                f"the last one {self._reason}; {self.MEND}"
            )

    @abstractmethod
    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """Nothing more is asked about these answers."""

    @abstractmethod
    def all_of(
        self, answers: Answers, rows: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[float | None]:
        """The rewards of an evaluation, whose answers have at most `max_tokens` tokens. Results of others that arrive
        meanwhile are kept."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    @abstractmethod
    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        """Begin to score a text."""

    @abstractmethod
    def _arrived(self, timeout_s: float) -> list[tuple[Key, Scored]]:
        """What has come, in any life."""

    def _failure(self, reason: str, prompt: Prompt) -> None:
        """A reward failed: it is counted, and the first one of a run is shown with its row."""
        self.failed += 1
        self._reason = reason
        if not self._warned:
            self._warned = True
            _log.warning(
                "the reward of an answer to the prompt %.200r could not be computed: %s; further ones are counted in "
                "failed_rewards, and samples.jsonl has reasons",
                prompt,
                reason,
            )

    def _taken(self, timeout_s: float) -> list[Scored]:
        """What has come of this life."""
        found = []
        for key, one in self._arrived(timeout_s):
            self._asked.discard(key)
            if key.life == self._life:
                found.append(one)
        return found

    def _of_evaluation(self, count: int) -> list[Scored]:
        """Wait for so many results of an evaluation."""
        found: list[Scored] = []
        while len(found) < count:
            for one in self._taken(1.0):
                (found if one.ticket == EVALUATION else self._kept).append(one)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def first_turns(rows: Sequence[Mapping[str, Any]]) -> list[Prompted]:
    """One answer to each row of an evaluation."""
    return [
        Prompted(ticket=EVALUATION, place=0, row=place, **prompt_fields(row))
        for place, row in enumerate(rows)
    ]


def scorer_of(config: RLConfig, folder: Path | None) -> Scorer:
    """The scorer of a run. `folder`: where files are looked for. Raises ConfigError for an unknown name."""
    task = config.task
    if task.has_reward_model:
        return ModelScorer(config.rl, task.max_failed)
    if task.environment is None:
        return RewardScorer(task, folder)
    from hyper_parallel.rl.environment_pool import EnvironmentScorer

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


SEED = 2**31
"""Added to the run's seed: held-out answers are drawn by other numbers than training's."""


@dataclass(frozen=True)
class Accuracy:
    """Mean rewards of held-out prompts; None where none could be computed."""

    sampled: float | None
    greedy: float | None
    prompts: int


def evaluate(
    config: RLConfig, rollout: RoleGroup, rows: Sequence[Mapping[str, Any]], scorer: Scorer, step: int
) -> Accuracy:
    """With the rollout's weights as they are; it is idle, and no reward is pending."""
    sampled = mean_reward(config, rollout, rows, scorer, step, config.rl.temperature)
    return Accuracy(sampled, mean_reward(config, rollout, rows, scorer, step, 0.0), len(rows))


def mean_reward(
    config: RLConfig,
    rollout: RoleGroup,
    rows: Sequence[Mapping[str, Any]],
    scorer: Scorer,
    step: int,
    temperature: float,
) -> float | None:
    """Of one answer to each prompt; None where no reward could be computed. One without a reward counts 0; by a reward
    model, whose scores have no zero that means anything, it does not count."""

    def answers(asked: Sequence[Prompted]) -> list[Sample]:
        found: list[Sample] = rollout.ask(
            step, "answer", asked=asked, temperature=temperature, seed=config.seed + SEED
        )
        return found

    rewards = scorer.all_of(answers, rows, config.rl.max_tokens)
    known = [one for one in rewards if one is not None]
    if not known:
        return None
    if config.task.has_reward_model:
        return statistics.fmean(known)
    return statistics.fmean(reward or 0.0 for reward in rewards)
