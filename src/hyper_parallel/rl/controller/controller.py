"""The loop of reinforcement learning: what starts, what is trained, and what weights rollouts generate with.

A turn of the loop sends every idle group its next list and then waits for the first answer, of a group or a reward:

    rollout   [install weights that arrived, begin to receive newer ones, generate: new prompts, at most `chunk` passes]
    actor     [train on a batch, send the weights]      as soon as the queue has a batch
    reward    [score the answers that have ended]       where rewards are a model's

How far generation may run ahead of training is the queue's to say (`rl.queue`): with `staleness: 0` a batch starts
after the one before it was trained, and the same loop is synchronous.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import GroupError
from hyper_parallel.launch.roles.protocol import Future, wait_any
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import BatchReport
from hyper_parallel.rl.controller.scorer import Scored, Scorer
from hyper_parallel.rl.controller.scorer_kinds import ModelScorer
from hyper_parallel.rl.controller.workers import RoleGroup, WeightSync, do
from hyper_parallel.rl.environments import prompt_fields
from hyper_parallel.rl.queue import StalenessQueue
from hyper_parallel.rl.sample import AnswerGroup, Appended, Prompted, Sample, has_reward_variance


class GroupLost(Exception):
    """Workers of a group died, or did not answer in time."""

    def __init__(self, group: RoleGroup, problem: str) -> None:
        super().__init__(problem)
        self.group = group


class LinkLost(Exception):
    """Weights could not be brought to a rollout whose workers are alive."""

    def __init__(self, rollout: RoleGroup, problem: str | None) -> None:
        super().__init__(problem)
        self.rollout = rollout


POLL_S = 0.05
"""Between looks for rewards while groups compute."""


@dataclass
class _List:
    """A list under way."""

    future: Future
    since: float
    ended: Callable[[list[Any]], None]


@dataclass
class _Next:
    """What a rollout is given with its next list."""

    new: list[AnswerGroup] = field(default_factory=list)
    """Groups of answers that begin."""
    going_on: list[tuple[AnswerGroup, Sample, Appended]] = field(default_factory=list)
    """Answers of several turns that are continued."""
    dropped: list[int] = field(default_factory=list)
    """Tickets that were given up."""
    arrived: bool = False
    """Whether weights have arrived, to be installed first."""


@dataclass
class LoopState:
    """How far a run is: what a checkpoint has."""

    step: int = 0
    version: int = 0
    next_row: int = 0
    again: list[int] = field(default_factory=list)
    """Rows that started and were lost with their workers, to be started again."""
    tokens: int = 0
    """Drawn in all samples that were trained."""


class Controller:
    """One run's loop. Its groups are ready and have their weights."""

    def __init__(
        self,
        config: RLConfig,
        groups: list[RoleGroup],
        weights: WeightSync,
        prompts: Prompts,
        scorer: Scorer,
        state: LoopState,
        queue: StalenessQueue[list[Sample]],
        trained: Callable[[BatchReport], None],
    ) -> None:
        """`trained` is told each batch that was trained, before anything else starts."""
        self._config, self._rl = config, config.rl
        self._groups = {one.name: one for one in groups}
        self._actor = groups[0]
        self._rollouts = [one for one in groups if one.has("rollout")]
        self._reference = next((one for one in groups if one.has("reference")), None)
        self._reward = next((one for one in groups if one.has("reward")), None)
        self._weights, self._prompts, self._scorer = weights, prompts, scorer
        self._trained = trained
        self.state, self.queue = state, queue
        self._lists: dict[str, _List] = {}
        self._next = {one.name: _Next() for one in self._rollouts}
        self._under_way: dict[int, AnswerGroup] = {}
        self._rows: dict[int, int] = {}
        """Of tickets that have not been trained."""
        self._refused: list[float | None] = []
        """Rewards of groups that were not taken since the last batch."""
        self._taken: list[Sample] | None = None
        """The batch that is being trained on, or scored before."""

    def run(self, steps: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Train until so many steps are done, or `stop` says so; then every group is idle.

        Raises GroupLost where workers died, and what a list raised otherwise.
        """
        while self.state.step < steps and not stop():
            self._start_scoring()
            self._start_training()
            for rollout in self._rollouts:
                if rollout.name not in self._lists:
                    self._generate(rollout)
            self._wait()
        self.settle()

    @property
    def batch(self) -> list[Sample]:
        """The batch that is being trained on, or whose rewards failed."""
        return self._taken or []

    @property
    def rows_under_way(self) -> list[int]:
        """Rows that have started and have no rewards yet."""
        return sorted(one.row for one in self._under_way.values())

    def settle(self) -> None:
        """Wait for the lists under way."""
        while self._lists:
            wait_any([one.future for one in self._lists.values()])
            self._take_ended()

    def forget(self, group: RoleGroup) -> None:
        """A group of workers was lost: what it had under way starts again elsewhere, or after its restart."""
        if group is self._reward and isinstance(self._scorer, ModelScorer):
            self._scorer.ask_again()
        self._lists.pop(group.name, None)
        for ticket in [one.ticket for one in self._under_way.values() if one.rollout == group.name]:
            lost = self._under_way.pop(ticket)
            self.queue.fail(ticket, lost.tokens)
            self._scorer.drop(ticket, range(lost.size))
            self.state.again.append(self._rows.pop(ticket))
        self.state.again.sort()
        if group.name in self._next:
            self._next[group.name] = _Next()

    def _admit(self, rollout: RoleGroup) -> None:
        """New groups of answers for a rollout that has room for them."""
        role, rl = self._config.roles.rollouts, self._rl
        busy = sum(
            one.size - len(one.samples) for one in self._under_way.values() if one.rollout == rollout.name
        )
        room = max(0, role.batch * role.spread.axes.replicate - busy)
        # To the end of the run, and not of this part of it: generation goes on beside a checkpoint.
        left = (rl.steps - self.state.step) * rl.prompts - self.queue.outstanding
        share = -(-rl.prompts // len(self._rollouts))
        count = min(-(-room // rl.group), share, self.queue.admissible(rollout.version), max(0, left))
        for ticket in self.queue.start(count, rollout.version):
            row = self._next_row()
            group = AnswerGroup(ticket, row, self._prompts[row], rollout.name, rl.group)
            self._under_way[ticket] = group
            self._rows[ticket] = row
            self._next[rollout.name].new.append(group)

    def _next_row(self) -> int:
        if self.state.again:
            return self.state.again.pop(0)
        self.state.next_row += 1
        return self.state.next_row - 1

    def _generate(self, rollout: RoleGroup) -> None:
        """Send a rollout its next list, if there is anything to do."""
        name = rollout.name
        given = self._next[name]
        begin = self._weights.before_generating(rollout, arrived=given.arrived, idle=not self._works(name))
        given.arrived = False
        told = len(begin)
        self._admit(rollout)
        new = [_asked(group, place) for group in given.new for place in range(group.size)]
        new += [
            _asked(group, sample.place, before=sample, appended=appended)
            for group, sample, appended in given.going_on
        ]
        if not begin and not self._works(name):
            return
        self._next[name] = _Next()
        if given.dropped:
            begin = [*begin, do("drop", tickets=given.dropped)]
        instructions = [*begin, do("generate", new=new, passes=self._rl.chunk)]
        receiving = self._weights.receiving(rollout)
        if receiving:
            instructions.append(do("arrived", link=name))

        def ended(results: list[Any]) -> None:
            problem = next((one for rank in results for one in rank[:told] if one is not None), None)
            for rank in results:
                for sample in rank[len(begin)]:
                    self._answered(sample)
            if problem is not None:
                raise LinkLost(rollout, problem)
            if receiving:
                self._next[name].arrived = all(rank[-1] for rank in results)

        self._send(rollout, instructions, ended)

    def _works(self, name: str) -> bool:
        """Whether a rollout has answers to generate."""
        return any(one.rollout == name and len(one.samples) < one.size for one in self._under_way.values())

    def _answered(self, sample: Sample) -> None:
        group = self._under_way.get(sample.ticket)
        if group is None:
            return  # it was dropped
        group.add(sample)
        self._scorer.submit(sample, group.task)

    def _scored(self, one: Scored) -> None:
        ticket = one.ticket
        group = self._under_way.get(ticket)
        if group is None:
            self._scorer.drop(ticket, [one.place])
            return
        if one.appended is not None:
            sample = group.samples[one.place]
            if len(sample.tokens) < self._rl.max_tokens:
                continued = group, group.samples.pop(one.place), one.appended
                self._next[group.rollout].going_on.append(continued)
                return
            # There is no room for another turn.
            self._scorer.drop(ticket, [one.place])
        group.score(one.place, one.reward, one.failed)
        if not group.complete:
            return
        del self._under_way[ticket]
        if self._rl.drops_equal and not has_reward_variance(group.rewards):
            self.queue.refuse(ticket, group.tokens)
            # A batch of these would be drawn for ever where each reward fails.
            self._refused += group.rewards
            if len(self._refused) >= self._rl.answers:
                self._scorer.check(self._refused)
                self._refused.clear()
            del self._rows[ticket]
            return
        if not self.queue.finish(ticket, group.in_order, group.oldest, group.tokens):
            del self._rows[ticket]

    def _start_scoring(self) -> None:
        """Send the reward model the answers that wait for it, if it is free."""
        group, scorer = self._reward, self._scorer
        if group is None or group.name in self._lists or not isinstance(scorer, ModelScorer):
            return
        role, waiting = self._config.roles.reward, scorer.waiting
        assert role is not None, "a group has the roles of the run"
        # Where it takes turns with generation, answers wait for a full batch of them.
        if not waiting or (self._works(group.name) and waiting < role.batch):
            return

        def ended(results: list[Any]) -> None:
            for one in scorer.give(results[0][0]):
                self._scored(one)

        self._send(group, [do("reward", groups=scorer.take())], ended)

    def _start_training(self) -> None:
        """Train on a batch, if there is one and the actor is free."""
        first = self._reference or self._actor
        if {self._actor.name, first.name} & self._lists.keys():
            return
        if self._taken is None and not self.queue.ready():
            return
        if ends := self._weights.before_training():
            self._send(self._actor, ends, self._sends_ended)
            return
        if self._taken is None:
            groups = self.queue.take()
            # In the order of rows, so that a batch does not depend on when its parts started.
            groups.sort(key=lambda group: group[0].row)
            self._taken = self._shuffled([sample for group in groups for sample in group])
            self._scorer.check([sample.reward for sample in self._taken])
            self._refused.clear()
        samples = self._taken
        if self._reference is None:
            self._train(samples, None)
        else:
            self._send(
                self._reference,
                [do("score", samples=samples)],
                lambda results: self._train(samples, results[0][0]),
            )

    def _sends_ended(self, results: list[Any]) -> None:
        """All of them, on all ranks."""
        problems = [next((rank[at] for rank in results if rank[at]), None) for at in range(len(results[0]))]
        broken = self._weights.sends_ended(problems)
        if broken:
            raise LinkLost(broken[0], next(filter(None, problems)))

    def _train(self, samples: list[Sample], reference: Any) -> None:
        version = self.state.version + self._rl.minibatches
        sends = self._weights.after_training(version)
        since = time.monotonic()

        def ended(results: list[Any]) -> None:
            problems = [
                next((rank[1 + at] for rank in results if rank[1 + at]), None) for at in range(len(sends))
            ]
            broken = self._weights.sent(version, problems)
            self._was_trained(samples, version, results[0][0], time.monotonic() - since)
            if broken:
                raise LinkLost(broken[0], next(filter(None, problems)))

        self._send(self._actor, [do("train", samples=samples, reference=reference), *sends], ended)

    def _was_trained(
        self, samples: list[Sample], version: int, metrics: dict[str, float], seconds: float
    ) -> None:
        staleness = [version - 1 - one.oldest for one in samples]
        assert all(0 <= one <= self.queue.bound for one in staleness), "the bound on staleness"
        self.state.version = version
        self.state.step += 1
        self.state.tokens += sum(sum(one.drawn) for one in samples)
        self.queue.trained(version)
        self._taken = None
        for ticket in {one.ticket for one in samples}:
            self._rows.pop(ticket, None)
        for ticket in self.queue.expired():
            self._expire(ticket)
        self._trained(
            BatchReport(
                step=self.state.step,
                samples=samples,
                metrics=metrics,
                staleness=staleness,
                train_s=seconds,
                group=self._rl.group,
                counters=self.queue.counters,
                failed_rewards=self._scorer.failed,
            )
        )

    def _expire(self, ticket: int) -> None:
        """Give up a group of answers that cannot be trained within the bound any more."""
        group = self._under_way.pop(ticket)
        self.queue.fail(ticket, group.tokens)
        self._scorer.drop(ticket, range(group.size))
        del self._rows[ticket]
        given = self._next[group.rollout]
        given.going_on = [one for one in given.going_on if one[0] is not group]
        if group in given.new:
            given.new.remove(group)
        else:
            given.dropped.append(ticket)

    def _shuffled(self, samples: list[Sample]) -> list[Sample]:
        """With `task.shuffle_rewards`: each reward at another answer of the batch."""
        if not self._config.task.shuffle_rewards:
            return samples
        order = list(range(len(samples)))
        random.Random(f"{self._config.seed}:{self.state.step}").shuffle(order)
        return [
            replace(one, reward=samples[other].reward, failed=samples[other].failed)
            for one, other in zip(samples, order, strict=True)
        ]

    def _send(self, group: RoleGroup, instructions: list[Any], ended: Callable[[list[Any]], None]) -> None:
        future = group.call(instructions, self.state.step + 1)
        self._lists[group.name] = _List(future, time.monotonic(), ended)

    def _wait(self) -> None:
        """Until a list ends or a reward comes; and take all that have."""
        assert self._lists or self._scorer.pending, (
            f"nothing runs at step {self.state.step}: {self.queue.outstanding} groups outstanding, "
            f"{len(self._under_way)} under way"
        )
        if self._lists:
            wait_any([one.future for one in self._lists.values()], POLL_S if self._scorer.pending else None)
        for one in self._scorer.results(0.0 if self._lists else POLL_S):
            self._scored(one)
        self._take_ended()

    def _take_ended(self) -> None:
        for name, one in list(self._lists.items()):
            if name not in self._lists or not one.future.done():
                continue
            del self._lists[name]
            group = self._groups[name]
            group.busy_s += time.monotonic() - one.since
            try:
                results = one.future.result()
            except GroupError as error:
                raise GroupLost(group, str(error)) from error
            one.ended(results)


def _asked(group: AnswerGroup, place: int, **before: Any) -> Prompted:
    """One answer of a group, or its next turn."""
    return Prompted(ticket=group.ticket, place=place, row=group.row, **prompt_fields(group.task), **before)
