"""The bound on staleness holds in every order and schedule, nothing is lost or trained twice, and training goes on."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import rl_schedules
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.queue import ORDERS, Order, StalenessQueue


class CapacityOnly:
    """Admission by capacity, (staleness + version + 1) batch - accepted - running, and the order of finishing."""

    def __init__(self, *, batch: int, staleness: int) -> None:
        self.batch, self.staleness, self.version = batch, staleness, 0
        self.started = self.lost = 0
        self.done: list[Any] = []

    def admissible(self, version: int) -> int:
        return max(0, (self.staleness + self.version + 1) * self.batch - self.started + self.lost)

    def start(self, count: int, version: int) -> list[int]:
        self.started += count
        return list(range(self.started - count, self.started))

    def finish(self, ticket: int, item: Any, oldest_version: int, tokens: int) -> bool:
        self.done.append(item)
        return True

    def fail(self, ticket: int, tokens: int = 0) -> None:
        self.lost += 1

    def refuse(self, ticket: int, tokens: int) -> None:
        self.lost += 1

    def ready(self) -> bool:
        return len(self.done) >= self.batch

    def take(self) -> list[Any]:
        taken, self.done = self.done[: self.batch], self.done[self.batch :]
        return taken

    def trained(self, version: int | None = None) -> int:
        self.version += 1
        return 0


def check(queue: Any, account: rl_schedules.Account) -> None:
    """The properties of a schedule that ended."""
    assert max(account.staleness) <= queue.bound
    assert len(account.trained) == len(set(account.trained)) == account.batches * queue.batch
    batches_ahead = (queue.bound - queue.updates + 1) // queue.updates + 1
    assert account.most_outstanding <= batches_ahead * queue.batch
    counters = queue.counters
    assert counters.trained.items == len(account.trained)
    ended = counters.trained.items + counters.stale.items + counters.failed.items + counters.refused.items
    assert account.started == ended + queue.outstanding
    assert account.refused == counters.refused.items
    assert counters.staleness == dict(sorted(Counter(account.staleness).items()))
    if queue.order != "discard":
        assert counters.stale.items == 0


def test_a_thousand_schedules() -> None:
    draw = random.Random(7)
    for seed in range(1000):
        updates = draw.choice((1, 1, 2, 4))
        staleness = draw.choice((0, updates - 1, updates, 2 * updates - 1, 3 * updates + 1))
        order = ORDERS[seed % 3]
        queue = StalenessQueue[Any](
            batch=draw.randint(1, 6), updates=updates, staleness=staleness, order=order
        )
        held, account = rl_schedules.run(
            queue,
            seed=seed,
            updates=updates,
            batches=5,
            workers=draw.randint(1, 4),
            slots=draw.randint(1, 6),
            lag=draw.choice((1, 4, 30)),
            failures=draw.choice((0.0, 0.05, 0.3)),
            restore=rl_schedules.restored if seed % 2 else None,
        )
        check(held, account)


def test_admission_by_capacity_alone_exceeds_the_bound() -> None:
    worst = {}
    for staleness in (1, 2, 4):
        _, account = rl_schedules.run(
            CapacityOnly(batch=4, staleness=staleness), seed=0, updates=1, batches=60, failures=0.0, lag=1
        )
        worst[staleness] = max(account.staleness)
        queue = StalenessQueue[Any](batch=4, staleness=staleness, order="window")
        _, bounded = rl_schedules.run(queue, seed=0, updates=1, batches=60, failures=0.0, lag=1)
        assert max(bounded.staleness) == staleness
    assert all(worst[staleness] > staleness for staleness in worst), worst
    assert worst[1] >= 3


@settings(max_examples=150, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    batch=st.integers(1, 3),
    updates=st.integers(1, 3),
    ahead=st.integers(0, 7),
    choices=st.lists(st.integers(0, 2**16), min_size=30, max_size=120),
)
def test_any_sequence_of_calls(
    order: Order, batch: int, updates: int, ahead: int, choices: list[int]
) -> None:
    """Calls in any order that the queue allows, with weights that lag, and updates that are skipped."""
    queue = StalenessQueue[int](batch=batch, updates=updates, staleness=updates - 1 + ahead, order=order)
    oldest: dict[int, int] = {}
    ended: set[int] = set()
    training: list[int] = []
    for choice in choices:
        what, value = choice % 7, choice // 7
        version = max(0, queue.version - value % 3)
        running = queue.running
        if what <= 1:
            free = queue.admissible(version)
            for ticket in queue.start(min(free, 1 + value % 4), version):
                oldest[ticket] = version
            with pytest.raises(ValueError, match="cannot start"):
                queue.start(queue.admissible(version) + 1, version)
        elif what <= 3 and running:
            ticket = running[value % len(running)]
            oldest[ticket] += (queue.version - oldest[ticket]) * (value % 5 == 0)
            queue.finish(ticket, ticket, oldest[ticket], 3)
        elif what == 4 and running:
            ticket = running[value % len(running)]
            ended.add(ticket)
            (queue.fail if value % 2 else queue.refuse)(ticket, 3)
        elif training:
            skipped = value % 3 == 0
            queue.trained(queue.version + (updates - 1 if skipped else updates))
            training = []
        elif queue.ready():
            training = queue.take()
            assert len(training) == batch and not ended & set(training)
            ended.update(training)
            assert all(queue.version + updates - 1 - oldest[ticket] <= queue.bound for ticket in training)
        queue = queue if training else StalenessQueue.from_state(json.loads(json.dumps(queue.state())))
    # Everything that runs ends, and newest weights are out: a batch can always be trained.
    for _ in range(4):
        if training:
            queue.trained()
        while not queue.ready():
            started = queue.start(queue.admissible(queue.version), queue.version)
            oldest.update(dict.fromkeys(started, queue.version))
            assert queue.running, "training stopped"
            for ticket in queue.running:
                queue.finish(ticket, ticket, oldest[ticket], 3)
        training = queue.take()
        assert all(queue.version + updates - 1 - oldest[ticket] <= queue.bound for ticket in training)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("updates", [1, 4])
def test_staleness_0_is_synchronous(order: Order, updates: int) -> None:
    queue = StalenessQueue[int](batch=3, updates=updates, staleness=0, order=order)
    for step in range(3):
        version = step * updates
        assert queue.version == version
        tickets = queue.start(queue.admissible(version), version)
        assert len(tickets) == 3 and queue.admissible(version) == 0
        for ticket in reversed(tickets):
            assert not queue.ready()
            queue.finish(ticket, ticket, version, 5)
        assert queue.take() == tickets
        assert queue.admissible(version) == 0
        queue.trained()
    assert queue.counters.staleness == {updates - 1: 9}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("updates", [1, 4])
def test_one_step_off(order: Order, updates: int) -> None:
    queue = StalenessQueue[int](batch=2, updates=updates, staleness=2 * updates - 1, order=order)
    assert queue.admissible(0) == 4
    first = queue.start(2, 0)
    for ticket in first:
        queue.finish(ticket, ticket, 0, 1)
    queue.take()
    assert queue.admissible(0) == 2, "the next batch starts while this one is in training"
    queue.start(2, 0)
    queue.trained()
    assert queue.admissible(updates) == 2


def test_the_orders_differ_as_they_say() -> None:
    def queue(order: Order) -> StalenessQueue[int]:
        made = StalenessQueue[int](batch=2, staleness=1, order=order)
        made.start(4, 0)
        for ticket in (1, 2):
            made.finish(ticket, ticket, 0, 10)
        return made

    assert not queue("fifo").ready(), "ticket 0 is of the first batch"
    for order in ("window", "discard"):
        held = queue(order)
        assert held.take() == [1, 2]
        held.trained()
        held.start(2, 1)
        for ticket in (4, 5):
            held.finish(ticket, ticket, 1, 10)
        # 0 and 3 can be trained at version 1 for the last time.
        assert held.ready() == (order == "discard")
        if order == "discard":
            assert held.take() == [4, 5]
            assert held.expired() == [0, 3]
            held.fail(0, 30)
            held.trained()
            assert held.finish(3, 3, 0, 40) is False
            assert (held.counters.stale.items, held.counters.stale.tokens) == (2, 70)
        else:
            held.finish(0, 0, 0, 10)
            assert not held.ready()
            held.fail(3, 7)
            assert held.take() == [0, 4]


def test_a_lost_item_moves_others_to_earlier_batches_and_frees_one_slot() -> None:
    queue = StalenessQueue[int](batch=2, staleness=0)
    first, second = queue.start(2, 0)
    queue.fail(first, 4)
    assert queue.admissible(0) == 1
    (third,) = queue.start(1, 0)
    queue.finish(third, third, 0, 1)
    queue.refuse(second, 6)
    (fourth,) = queue.start(queue.admissible(0), 0)
    queue.finish(fourth, fourth, 0, 1)
    assert queue.take() == [third, fourth]
    queue.trained()
    assert queue.counters.failed.tokens == 4 and queue.counters.refused.tokens == 6
    assert queue.counters.wasted_share == 10 / 12


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_in_training_is_trained_again_from_a_checkpoint(order: Order) -> None:
    queue = StalenessQueue[int](batch=2, staleness=1, version=5, order=order)
    for ticket in queue.start(4, 5)[:3]:
        queue.finish(ticket, ticket, 5, 1)
    batch = queue.take()
    again = StalenessQueue[int].from_state(json.loads(json.dumps(queue.state(encode=str))), decode=int)
    assert again.version == 5 and again.running == (3,)
    assert again.take() == batch
    assert again.outstanding == queue.outstanding == 4
    assert again.state() == queue.state()


def test_versions_that_cannot_be_are_refused() -> None:
    queue = StalenessQueue[int](batch=1, updates=2, staleness=2, version=3)
    (ticket,) = queue.start(1, 3)
    with pytest.raises(ValueError, match="no token of it"):
        queue.finish(ticket, 0, 2, 1)
    queue.finish(ticket, 0, 3, 1)
    with pytest.raises(ValueError, match="not running"):
        queue.finish(ticket, 0, 3, 1)
    with pytest.raises(ValueError, match="leads there"):
        queue.trained()
    queue.take()
    with pytest.raises(ValueError, match="no batch is ready"):
        queue.take()
    with pytest.raises(ValueError, match="leads there"):
        queue.trained(6)
    queue.trained(4)
    assert queue.version == 4


def test_a_bound_below_a_batchs_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match="give at least 3, 0 for synchronous"):
        StalenessQueue[int](batch=1, updates=4, staleness=2)
    with pytest.raises(ConfigError, match="one of fifo, window, discard"):
        StalenessQueue[int](batch=1, order="lifo")  # type: ignore[arg-type]
