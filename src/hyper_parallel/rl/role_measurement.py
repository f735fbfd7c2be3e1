"""Measurement of role times on real workers: a few waves of answers and a few updates, in each kind of layout.

The workers are those of a run: the same groups, models, prompts, rewards and lists of instructions. First all devices
take turns; then some train while the others generate, at the same time if the run's loop is asynchronous. What the
updates change is thrown away. The warm-up is done first, since answers are as long as they will be only after it, and
saved as the run's checkpoint of step 0.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import GroupError
from hyper_parallel.launch.roles.engine import Engine
from hyper_parallel.launch.roles.protocol import Future, wait_any
from hyper_parallel.rl.controller.controller import LoopState
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.controller.scorer import Scorer
from hyper_parallel.rl.controller.warm_up import warm_up
from hyper_parallel.rl.controller.workers import HOST, RoleGroup, WeightSync, do, groups_of
from hyper_parallel.rl.environments import prompt_fields
from hyper_parallel.rl.queue import StalenessQueue
from hyper_parallel.rl.role_layouts import Candidates, Measured, RoleLayout, RoleTimes, Wave, on_layout
from hyper_parallel.rl.sample import Prompted, Sample, has_reward_variance

ROUNDS = 4
"""Waves of each size, and batches, that are timed in a layout, where there is time."""
BUDGET_S = 60.0
"""Seconds of a layout after which no further round begins."""
MOST_REFUSED = 0.9


class Stopped(Exception):
    """The user asked for the end."""


class Measurement:
    """Of one run's roles. Workers are started once for each layout."""

    def __init__(
        self,
        config: RLConfig,
        candidates: Candidates,
        prompts: Prompts,
        scorer: Scorer,
        engine: Callable[[], Engine],
        recorder: Recorder,
        stop: Callable[[], bool] = lambda: False,
        host: str = HOST,
    ) -> None:
        """`engine`: who starts the workers. `stop`: asked between lists. `host`: whose operations the groups have."""
        self._config, self._candidates, self._prompts, self._scorer = config, candidates, prompts, scorer
        self._engine, self._recorder, self._stop, self._host = engine, recorder, stop, host
        self._waves = Waves(config, prompts, scorer)
        self._reward = 0.0

    def measured(self) -> Measured:
        """Times in both kinds of layout, where there are both.

        A layout in which workers are lost, as for want of memory, is left out if the other one runs. Raises GroupError
        where none does, what building the models raises, and Stopped.
        """
        found: dict[bool, RoleTimes] = {}
        lost: GroupError | None = None
        for layout in (self._candidates.together, _middle(self._candidates)):
            if layout is None:
                continue
            self._recorder.note(f"measuring: {layout.words}")
            try:
                found[layout.together] = self._in(layout)
            except GroupError as error:
                self._recorder.note(f"left out, because its workers were lost: {error}")
                lost = error
            finally:
                self._scorer.begin_anew()
                self._scorer.failed = 0  # of the run there were none yet
        if not found:
            assert lost is not None
            raise lost
        groups = self._waves.groups()
        equal = sum(not has_reward_variance([one.reward for one in group]) for group in groups)
        return Measured(
            together=found.get(True),
            apart=found.get(False),
            lengths=tuple(self._waves.lengths),
            reward=self._reward,
            refused=min(MOST_REFUSED, equal / len(groups)) if self._config.rl.drops_equal else 0.0,
        )

    def _in(self, layout: RoleLayout) -> RoleTimes:
        """One layout's times, on workers that live as long."""
        config = on_layout(self._config, layout)
        plans = groups_of(config)
        workers = len({device for plan in plans for device in plan.devices})
        with self._engine() as engine:
            groups = [RoleGroup(engine, config, plan, workers, self._host) for plan in plans]
            actor, rollouts = groups[0], [one for one in groups if one.has("rollout")]
            for one in groups:
                one.wait_ready()
            weights = WeightSync(config, actor, rollouts)
            self._begin(config, actor, rollouts, weights)
            copies = layout.rollout // self._candidates.engine // len(rollouts)
            sizes = self._waves.sizes(layout.rollout // self._candidates.engine)
            for one in rollouts:  # memory is taken, and code is loaded
                self._drive([self._waves.lane(one, copies, sizes[-1:], [])], lambda: True)
            batch = self._batch()
            waves, train, score = list[Wave](), list[float](), list[float]()
            training = self._training(actor, batch, train, score)
            generating = [self._waves.lane(one, copies, sizes, waves) for one in rollouts]
            self._waves.wait()
            self._drive([self._training(actor, batch, [], [])], lambda: True)
            enough = ROUNDS * len(sizes)
            if layout.together or not self._config.rl.staleness:
                # A synchronous loop never has both sides at work.
                self._drive(generating, lambda: len(waves) >= enough, lambda: len(waves) >= len(sizes))
                self._drive([training], lambda: len(train) >= ROUNDS)
            else:
                self._drive(
                    [training, *generating],
                    lambda: len(train) >= ROUNDS and len(waves) >= enough,
                    least=lambda: bool(train) and len(waves) >= len(sizes),
                )
            self._waves.wait()
            if not self._reward:
                self._reward = self._waves.reward_seconds()
            return RoleTimes(
                layout=layout,
                waves=tuple(waves),
                train=tuple(train),
                score=tuple(score),
                transfer=tuple(self._transfers(config, rollouts, weights)),
            )

    def _begin(
        self, config: RLConfig, actor: RoleGroup, rollouts: Sequence[RoleGroup], weights: WeightSync
    ) -> None:
        """The policy as the run begins, or goes on, with it; on all rollouts."""
        if actor.ask(0, "resume") is None and config.warmup is not None:
            warm_up(config, actor, rollouts[0], weights, self._prompts, self._scorer, self._recorder)
            rl = config.rl
            queue = StalenessQueue[list[Sample]](
                batch=rl.prompts, updates=rl.minibatches, staleness=rl.staleness, order=rl.order
            )
            state = {"state": asdict(LoopState()), "queue": queue.state(list), "before": None}
            actor.call([do("save", step=0, state=state)], 0).result()
            actor.ask(0, "saved")
        for one in rollouts:
            weights.connect(one, 0)
            weights.now(one, 0, 0)

    def _batch(self) -> list[Sample]:
        """A batch of whole groups, repeated as often as is necessary."""
        groups, count = self._waves.groups(), self._config.rl.prompts
        return [
            replace(one, ticket=ticket, row=ticket, versions=(0,) * len(one.tokens))
            for ticket in range(count)
            for one in groups[ticket % len(groups)]
        ]

    def _training(
        self, actor: RoleGroup, batch: Sequence[Sample], train: list[float], score: list[float]
    ) -> Lane:
        """Updates on a batch, again and again."""
        while True:
            reference: Any = None
            if self._config.rl.kl:
                since = time.monotonic()
                future = actor.call([do("score", samples=batch)], 0)
                yield future
                reference = future.result()[0][0]
                score.append(time.monotonic() - since)
            since = time.monotonic()
            future = actor.call([do("train", samples=batch, reference=reference)], 0)
            yield future
            future.result()
            train.append(time.monotonic() - since)
            yield None

    def _transfers(
        self, config: RLConfig, rollouts: Sequence[RoleGroup], weights: WeightSync
    ) -> Iterator[float]:
        if config.shares_model:
            return
        for version in range(1, ROUNDS + 1):
            since = time.monotonic()
            for one in rollouts:
                weights.now(one, version, 0)
            yield time.monotonic() - since

    def _drive(
        self,
        lanes: Sequence[Lane],
        enough: Callable[[], bool],
        least: Callable[[], bool] = lambda: True,
    ) -> None:
        """Let lanes go on, at the same time, until there is `enough`, or the time is up and the `least` is there; each
        ends what it has begun."""
        begun = time.monotonic()

        def over() -> bool:
            return enough() or (time.monotonic() - begun > BUDGET_S and least())

        waited: dict[int, Future] = {}
        for number, lane in enumerate(lanes):
            first = next(lane)
            assert first is not None
            waited[number] = first
        while waited:
            wait_any(list(waited.values()))
            for number, future in list(waited.items()):
                if not future.done():
                    continue
                following = next(lanes[number])
                if following is None and not over():
                    following = next(lanes[number])
                if following is None:
                    del waited[number]
                else:
                    waited[number] = following
            if self._stop():
                raise Stopped


def _middle(candidates: Candidates) -> RoleLayout | None:
    """Of the layouts with other devices for each role, that whose actor has about half of them."""
    half = candidates.devices / 2
    return min(candidates.apart, key=lambda one: abs(one.train - half), default=None)


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
