"""Adversarial schedules of a queue of groups: durations, failures, late weights and restarts drawn at random.

The driver keeps its own account: the version at which every item's first token was drawn, and the version at the start
of each update that trained it. It believes nothing that the queue says about staleness.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Queue(Protocol):
    """The part of a queue that a schedule uses."""

    version: int
    batch: int

    def admissible(self, version: int) -> int: ...
    def start(self, count: int, version: int) -> list[int]: ...
    def finish(self, ticket: int, item: Any, oldest_version: int, tokens: int) -> bool: ...
    def fail(self, ticket: int, tokens: int = 0) -> None: ...
    def refuse(self, ticket: int, tokens: int) -> None: ...
    def ready(self) -> bool: ...
    def take(self) -> list[Any]: ...
    def trained(self, version: int | None = None) -> int: ...


@dataclass(kw_only=True)
class Account:
    """What happened."""

    staleness: list[int] = field(default_factory=list)
    """Of each trained item: the last update's version less its oldest token's."""
    trained: list[int] = field(default_factory=list)
    started: int = 0
    failed: int = 0
    refused: int = 0
    most_outstanding: int = 0
    batches: int = 0


@dataclass
class _Run:
    ticket: int
    version: int
    oldest: int
    ends: int


def run(
    queue: Queue,
    *,
    seed: int,
    updates: int,
    batches: int,
    workers: int = 6,
    slots: int = 4,
    lag: int = 3,
    failures: float = 0.05,
    restore: Callable[[Any], Any] | None = None,
) -> tuple[Queue, Account]:
    """Trains `batches` batches. `lag`: a worker takes new weights up to that much time after they are there.

    `restore`: makes a queue of the state of one; it is then killed and restored at random. Raises AssertionError if
    training stops although everything that started ends.
    """
    draw = random.Random(seed)
    account = Account()
    weights = [0] * workers
    running: list[list[_Run]] = [[] for _ in range(workers)]
    busy_until: int | None = None
    now = 0
    quiet = 0
    while account.batches < batches:
        now += 1
        before = (account.started, account.batches, len(account.trained), account.failed + account.refused)
        for worker in range(workers):
            if weights[worker] != queue.version and draw.random() < 1 / max(1, lag):
                weights[worker] = queue.version
                for one in running[worker]:
                    if draw.random() < 0.2:  # it had not drawn a token yet
                        one.oldest = weights[worker]
            for one in [one for one in running[worker] if one.ends <= now]:
                running[worker].remove(one)
                tokens = draw.randint(1, 9)
                kind = draw.random()
                if kind < failures:
                    queue.fail(one.ticket, tokens)
                    account.failed += 1
                elif kind < 2 * failures:
                    queue.refuse(one.ticket, tokens)
                    account.refused += 1
                else:
                    queue.finish(one.ticket, [one.ticket, one.oldest], one.oldest, tokens)
            free = min(slots - len(running[worker]), queue.admissible(weights[worker]))
            if free > 0 and draw.random() < 0.8:
                for ticket in queue.start(draw.randint(1, free), weights[worker]):
                    account.started += 1
                    long = draw.choice((1, 1, 2, 3, 5, 40, 150))
                    running[worker].append(_Run(ticket, weights[worker], weights[worker], now + long))
        if busy_until is not None and now >= busy_until:
            queue.trained()
            busy_until = None
            account.batches += 1
        if busy_until is None and account.batches < batches and queue.ready():
            for ticket, oldest in queue.take():
                account.trained.append(ticket)
                account.staleness.append(queue.version + updates - 1 - oldest)
            busy_until = now + draw.choice((1, 2, 10))
        held = account.started - account.failed - account.refused - account.batches * int(queue.batch)
        account.most_outstanding = max(account.most_outstanding, held - dropped(queue))
        if restore is not None and busy_until is None and draw.random() < 0.02:
            queue = restore(queue)
            for ones in running:  # half of the workers' items died with the controller
                for one in [one for one in ones if draw.random() < 0.5]:
                    ones.remove(one)
                    queue.fail(one.ticket)
                    account.failed += 1
        after = (account.started, account.batches, len(account.trained), account.failed + account.refused)
        quiet = 0 if after != before else quiet + 1
        assert quiet < 2000, f"training stopped at version {queue.version}"
    return queue, account


def dropped(queue: Any) -> int:
    """Items that the queue dropped, where it can."""
    counters = getattr(queue, "counters", None)
    return 0 if counters is None else int(counters.stale.items)


def restored(queue: Any) -> Any:
    """The queue from its state, written as JSON and read again."""
    return type(queue).from_state(json.loads(json.dumps(queue.state())))
