"""Rewards by a reward model: answers wait here until its group of workers has time for them.

The controller takes what waits, sends it with a list of its own, and gives back the scores. In a synchronous run the
answers to a prompt wait for each other and are scored together, so that scores, whose last bits depend on what is
computed in the same forward pass, do not depend on when which answer ended. Otherwise what waits is scored together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.config.rl import RLTraining
from hyper_parallel.rl.controller.scorer import Answers, Key, Scored, Scorer, first_turns
from hyper_parallel.rl.controller.workers import RoleGroup
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.rl.rewards.reward import Prompt

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
