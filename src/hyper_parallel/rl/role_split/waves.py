"""Waves of answers for the measurement: generated from start to end, timed, and scored as a run scores them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.launch.roles.interface import Future
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.scorer import Scorer
from hyper_parallel.rl.controller.workers import RoleGroup, do
from hyper_parallel.rl.environments.environment import prompt_fields
from hyper_parallel.rl.role_split.role_times import Wave
from hyper_parallel.rl.sample import Prompted, Sample

FIRST_ROW = 2**41
"""Rows of prompts that neither the run nor its warm-up comes to."""
MOST_SCORED = 32
"""Groups whose rewards are timed."""

Lane = Iterator[Future | None]
"""What one group of workers does: lists of instructions, each going on when the future that it gave is done; None after
the last one of a piece of work."""


class Waves:
    """Answers to prompts of the task. An answer to an environment ends with its first turn."""

    def __init__(self, config: RLConfig, prompts: Prompts, scorer: Scorer) -> None:
        self.lengths: list[int] = []
        """Tokens of all answers."""
        self._config, self._prompts, self._scorer = config, prompts, scorer
        self._samples: dict[int, dict[int, Sample]] = {}
        self._tickets = itertools.count()

    def sizes(self, engines: int) -> list[int]:
        """Answers of an engine at once: all that it has where there are `engines`, half and a quarter of it; the most
        last."""
        most = min(self._config.roles.rollout.batch, -(-self._config.rl.answers // engines))
        return sorted({-(-most // part) for part in (4, 2, 1)})

    def lane(self, rollout: RoleGroup, copies: int, sizes: Sequence[int], into: list[Wave]) -> Lane:
        """A wave of each size, again and again, on a group of workers with `copies` engines."""
        for size in itertools.cycle(sizes):
            # A whole group at least: updates are on such.
            yield from self._wave(rollout, copies, max(size * copies, self._config.rl.group), into)
            yield None

    def groups(self) -> list[list[Sample]]:
        """Groups of answers that are whole, with the rewards that have come."""
        size = self._config.rl.group
        return [[one[place] for place in range(size)] for one in self._samples.values() if len(one) == size]

    def wait(self) -> None:
        """Until all rewards have come."""
        while self._scorer.pending:
            self._take(1.0)

    def reward_seconds(self) -> float:
        """Seconds of one reward worker for a group: of groups that are all scored at once."""
        groups = self.groups()[:MOST_SCORED]
        since = time.monotonic()
        for group in groups:
            ticket = next(self._tickets)
            for one in group:
                self._scorer.submit(replace(one, ticket=ticket), one.task)
        self.wait()
        return (time.monotonic() - since) * self._config.task.workers / len(groups)

    def _wave(self, rollout: RoleGroup, copies: int, count: int, into: list[Wave]) -> Iterator[Future]:
        size = self._config.rl.group
        tickets = [next(self._tickets) for _ in range(-(-count // size))]
        tasks = {ticket: self._prompts[FIRST_ROW + ticket] for ticket in tickets}
        asked = [
            Prompted(ticket=ticket, place=place, row=FIRST_ROW + ticket, **prompt_fields(tasks[ticket]))
            for ticket in tickets
            for place in range(size)
        ][:count]
        engine = {(one.ticket, one.place): number % copies for number, one in enumerate(asked)}
        loads = [(0, 0)] * copies
        since, new = time.monotonic(), asked
        # As after new weights, which each step brings.
        begin = [do("renewed", version=rollout.version)]
        missing = len(asked)
        while missing:
            future = rollout.call([*begin, do("generate", new=new, passes=self._config.rl.chunk)], 0)
            yield future
            for sample in (one for rank in future.result() for one in rank[-1]):
                missing -= 1
                at, tokens = engine[sample.ticket, sample.place], len(sample.tokens)
                loads[at] = (max(loads[at][0], tokens), loads[at][1] + tokens)
                self.lengths.append(tokens)
                task = tasks[sample.ticket]
                self._samples.setdefault(sample.ticket, {})[sample.place] = replace(sample, task=task)
                self._scorer.submit(sample, task)
            self._take(0.0)
            begin, new = [], []
        into.append(Wave(loads=tuple(loads), seconds=time.monotonic() - since))

    def _take(self, timeout_s: float) -> None:
        for one in self._scorer.results(timeout_s):
            if one.appended is not None:
                self._scorer.drop(one.ticket, [one.place])
            known = self._samples.get(one.ticket, {})
            if one.place in known:
                known[one.place] = replace(known[one.place], reward=one.reward)
