"""Scorers: rewards of answers, computed as answers end; evaluation. `controller.scorer_kinds` has those of a run."""

from __future__ import annotations

import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import RewardError
from hyper_parallel.rl.controller.workers import RoleGroup
from hyper_parallel.rl.environments import prompt_fields
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
