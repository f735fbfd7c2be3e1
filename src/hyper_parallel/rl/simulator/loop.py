"""Discrete-event simulation of one loop: rollout engines, rewards and an actor around the real queue.

Events: an answer ends on an engine; a group's rewards are there; a batch is trained; the actor is free after the
transfer of its weights. Between events, free slots are filled as the queue admits, and a batch that is ready is
trained. Everything random is drawn from one seeded source, in the order of tickets.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from hyper_parallel.rl.queue import Counters, StalenessQueue


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Seconds of the parts of a loop that are not generation."""

    train: float
    """Of a batch."""
    transfer: float
    """After each `batches_per_step` batches; neither side works."""
    batches_per_step: int
    reward: float
    reward_workers: int
    recompute: float
    """For each token of an answer that goes on under new weights."""
    interrupt: bool
    alternate: bool = False
    """Whether the engines stand still while a batch is trained, on the same devices."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Sums until a moment."""

    now: float
    busy: float
    tokens: float
    training: float
    counters: Counters


@dataclass
class _Group:
    answers: int
    version: int
    tokens: float = 0.0


class Loop:
    """The state of a simulated loop."""

    def __init__(
        self,
        *,
        engines: list[Engine],
        queue: StalenessQueue[int],
        times: LoopTimes,
        group: int,
        length: Callable[[random.Random], int],
        refused: float,
        seed: int,
    ) -> None:
        """`length`: draws the tokens of an answer. `group`: answers to each prompt. `refused`: share of groups."""
        self.engines, self.queue, self.times = engines, queue, times
        self.group, self.refused = group, refused
        self.batches = 0
        self._length = length
        self._lengths, self._filter = random.Random(seed), random.Random(seed + 1)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._posted = 0
        self._stamp = [0] * len(engines)
        self._waiting: deque[tuple[int, int]] = deque()
        self._groups: dict[int, _Group] = {}
        self._rewards = [0.0] * times.reward_workers
        self._free = True
        self._version = 0
        """Of the rollouts' weights."""
        self._draining = False
        """Whether newer weights wait until all running answers have ended."""
        self._training = 0.0
        self._admits = False
        """Whether more groups may start than there were slots for."""
        self._changed = True
        """Whether the queue or the engines' weights changed since the queue was asked last."""

    def run(self, batches: int) -> Snapshot:
        """Until that many batches are trained in all."""
        self._go_on()
        while self.batches < batches:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._go_on()
        for engine in self.engines:
            engine.advance(self._now)
        return Snapshot(
            now=self._now,
            busy=sum(engine.busy for engine in self.engines),
            tokens=sum(engine.tokens for engine in self.engines),
            training=self._training,
            counters=self.queue.counters,
        )

    def _post(self, when: float, happen: Callable[[], None]) -> None:
        self._posted += 1
        heapq.heappush(self._events, (when, self._posted, happen))

    def _go_on(self) -> None:
        if self._free and self._changed and self.queue.ready():
            self.queue.take()
            self._free = False
            self._training += self.times.train
            if self.times.alternate:
                for at, engine in enumerate(self.engines):
                    engine.pause(self._now, self._now + self.times.train)
                    self._watch(at)
            self._post(self._now + self.times.train, self._trained)
        if self._changed or self._waiting or self._admits:
            self._fill()
        self._changed = False

    def _fill(self) -> None:
        """Free slots get waiting answers, then those of new groups."""
        self._admits = False
        if self._draining:
            return
        open_engines = [at for at, one in enumerate(self.engines) if one.running < one.slots]
        if not open_engines:
            self._admits = True
            return
        free = sum(self.engines[at].slots - self.engines[at].running for at in open_engines)
        if len(self._waiting) >= free:
            self._admits = True
        elif allowed := self.queue.admissible(self._version):
            groups = min(allowed, -(-(free - len(self._waiting)) // self.group))
            self._admits = allowed > groups
            for ticket in self.queue.start(groups, self._version):
                self._groups[ticket] = _Group(self.group, self._version)
                self._waiting.extend((ticket, self._length(self._lengths)) for _ in range(self.group))
        if not self._waiting:
            return
        least = [(self.engines[at].running, at) for at in open_engines]
        heapq.heapify(least)
        joined = set()
        while self._waiting and least:
            running, at = heapq.heappop(least)
            self.engines[at].join(self._now, *self._waiting.popleft())
            joined.add(at)
            if running + 1 < self.engines[at].slots:
                heapq.heappush(least, (running + 1, at))
        for at in sorted(joined):
            self._watch(at)

    def _watch(self, at: int) -> None:
        """The event of an engine's next end, in place of the one that was posted before."""
        self._stamp[at] += 1
        stamp = self._stamp[at]
        if self.engines[at].running:
            self._post(self.engines[at].next_end(), lambda: self._ended(at, stamp))

    def _ended(self, at: int, stamp: int) -> None:
        if stamp != self._stamp[at]:
            return
        engine = self.engines[at]
        _, ticket, tokens = engine.end()
        if self._draining and not any(one.running for one in self.engines):
            self._take_weights()
        self._watch(at)
        group = self._groups[ticket]
        group.answers -= 1
        group.tokens += tokens
        if group.answers:
            return
        start = self._now
        if self._rewards:
            start = max(start, heapq.heappop(self._rewards))
            heapq.heappush(self._rewards, start + self.times.reward)
        if start + self.times.reward > self._now:
            self._post(start + self.times.reward, lambda: self._rewarded(ticket))
        else:
            self._rewarded(ticket)

    def _rewarded(self, ticket: int) -> None:
        self._changed = True
        group = self._groups.pop(ticket, None)
        if group is None:  # stopped, because it had expired
            return
        if self._filter.random() < self.refused:
            self.queue.refuse(ticket, round(group.tokens))
        else:
            self.queue.finish(ticket, ticket, group.version, round(group.tokens))

    def _trained(self) -> None:
        self._changed = True
        self.queue.trained()
        self.batches += 1
        self._stop_expired()
        if self.batches % self.times.batches_per_step:
            self._free = True
            return
        if self.times.interrupt or not any(engine.running for engine in self.engines):
            self._take_weights()
        else:
            self._draining = True
        self._post(self._now + self.times.transfer, self._transferred)

    def _take_weights(self) -> None:
        self._draining, self._changed = False, True
        self._version = self.queue.version
        for at, engine in enumerate(self.engines):
            engine.advance(self._now)
            again = engine.held_tokens * self.times.recompute
            engine.pause(self._now, self._now + self.times.transfer + again)
            self._watch(at)

    def _transferred(self) -> None:
        self._free = self._changed = True

    def _stop_expired(self) -> None:
        """Groups that cannot be trained within the bound any more: their answers stop."""
        expired = set(self.queue.expired())
        if not expired:
            return
        for at, engine in enumerate(self.engines):
            drawn = engine.stop(self._now, expired)
            for ticket, tokens in drawn.items():
                self._groups[ticket].tokens += tokens
            if drawn:
                self._watch(at)
        self._waiting = deque(one for one in self._waiting if one[0] not in expired)
        for ticket in expired:
            self.queue.fail(ticket, round(self._groups.pop(ticket).tokens))


# One rollout engine with continuous batching, as a discrete-event model.
#
# All running answers get a token in each pass, and a pass of n answers takes p + s n seconds. So a single counter of
# passes says how far every answer is: one that joins at pass m and has t tokens ends at pass m + t, and the engine's
# next event is the smallest such number, whatever joins or leaves before.


class Engine:
    """Running answers and the time that they took. Times are seconds; they never go back."""

    def __init__(self, slots: int, pass_seconds: float, sequence_seconds: float) -> None:
        self.slots = slots
        self.pass_seconds = pass_seconds
        self.sequence_seconds = sequence_seconds
        self.busy = 0.0
        """Seconds in which answers ran."""
        self.tokens = 0.0
        """Tokens drawn."""
        self._passes = 0.0
        self._now = 0.0
        self._running: list[tuple[float, int, float]] = []

    @property
    def running(self) -> int:
        """Answers that run."""
        return len(self._running)

    @property
    def held_tokens(self) -> float:
        """Tokens drawn so far for running answers."""
        return sum(self._passes - begun for _, _, begun in self._running)

    def next_end(self) -> float:
        """When the next answer ends; inf if none runs."""
        if not self._running:
            return inf
        return self._now + (self._running[0][0] - self._passes) * self._pass()

    def join(self, now: float, ticket: int, tokens: int) -> None:
        """An answer begins."""
        self.advance(now)
        heapq.heappush(self._running, (self._passes + tokens, ticket, self._passes))

    def end(self) -> tuple[float, int, int]:
        """The next answer ends: (when, ticket, tokens)."""
        when = self.next_end()
        self.advance(when)
        last, ticket, begun = heapq.heappop(self._running)
        self._passes = last  # free of rounding
        return when, ticket, round(last - begun)

    def advance(self, now: float) -> None:
        """Answers run until `now`, before any of them ends."""
        if now <= self._now:  # paused until later
            return
        if self._running:
            seconds = now - self._now
            self.busy += seconds
            passes = seconds / self._pass()
            self._passes += passes
            self.tokens += passes * len(self._running)
        self._now = now

    def pause(self, now: float, until: float) -> None:
        """Nothing runs between `now`, or the end of an earlier pause, and `until`."""
        self.advance(now)
        self._now = max(self._now, until)

    def stop(self, now: float, tickets: set[int]) -> dict[int, float]:
        """Answers of these tickets stop: the tokens that were drawn for them."""
        self.advance(now)
        drawn: dict[int, float] = {}
        for _, ticket, begun in self._running:
            if ticket in tickets:
                drawn[ticket] = drawn.get(ticket, 0.0) + self._passes - begun
        if drawn:
            self._running = [one for one in self._running if one[1] not in tickets]
            heapq.heapify(self._running)
        return drawn

    def _pass(self) -> float:
        return self.pass_seconds + self.sequence_seconds * len(self._running)
