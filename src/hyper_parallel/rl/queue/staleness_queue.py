"""Bounded staleness: admission and batch order of groups of answers, whose bound holds for every trained item.

An item is a group: all answers to one prompt. Its ticket is its number in the order in which items start. Version v is
the number of optimizer updates done. A batch is trained by `updates` consecutive updates, the last of which starts at
version v + updates - 1 if the first starts at v; the staleness of an item is that last version less the version of its
oldest token, whichever of the updates really trains it. It never exceeds `bound`:

    bound = staleness, or updates - 1 for staleness = 0, which is as fresh as mini-batches of one batch can be

    staleness 0              synchronous: a batch starts after the one before it was trained (all three orders)
    staleness 2 updates - 1  one step off: the next batch is generated while one is trained

Life of an item: `start` -> running -> `finish` -> finished -> `take` -> in training -> `trained`. Its slot is released
at the end only, or by `fail` and `refuse`. So capacity counts what has started and was not trained, and nothing that
is lost or restored can inflate it.

Training never stops for good if all that started finishes or fails, the rollouts get newer weights, and there are
prompts: an item that a batch waits for is running; and if none is running and the newest weights are out, either a
batch is ready or `admissible` is positive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.queue import orders

Order = Literal["fifo", "window", "discard"]
ORDERS: tuple[Order, ...] = get_args(Order)
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Finished(Generic[Item]):
    item: Item
    oldest: int
    tokens: int


class StalenessQueue(Generic[Item]):
    """Items that started and are not trained yet, with the right to start more. One batch is in training at a time."""

    def __init__(
        self, *, batch: int, updates: int = 1, staleness: int = 0, order: Order = "fifo", version: int = 0
    ) -> None:
        """`batch`: items that are trained together. `updates`: optimizer updates for each batch. `staleness`: η, in
        optimizer updates. `version`: the number of updates done so far.

        Raises ConfigError for a bound that `updates` alone exceed.
        """
        if batch < 1 or updates < 1 or staleness < 0 or order not in ORDERS:
            raise ConfigError(
                f"batch {batch}, updates {updates}, staleness {staleness}, order {order!r}: batch and updates are at "
                f"least 1, staleness at least 0, and the order is one of {', '.join(ORDERS)}"
            )
        if 0 < staleness < updates - 1:
            raise ConfigError(
                f"staleness {staleness}: the last of {updates} updates of a batch is {updates - 1} updates after the "
                f"first; give at least {updates - 1}, 0 for synchronous training, or fewer updates"
            )
        self.batch, self.updates, self.order = batch, updates, order
        self.staleness = staleness
        self.bound = max(staleness, updates - 1)
        """The largest staleness that an item is trained with."""
        self.version = version
        """The number of optimizer updates done, as `trained` said last."""
        self.counters = Counters()
        self._next = 0
        self._running: dict[int, int] = {}
        self._finished: dict[int, _Finished[Item]] = {}
        self._training: dict[int, _Finished[Item]] = {}
        self._versions = Counter[int]()
        """How many running and finished items are of each oldest version, as known so far."""
        self._done = Counter[int]()
        """Of these, the finished ones."""

    @property
    def outstanding(self) -> int:
        """Items that started and were not trained: the slots in use."""
        return len(self._running) + len(self._finished) + len(self._training)

    @property
    def running(self) -> tuple[int, ...]:
        """Tickets that started and have not finished."""
        return tuple(self._running)

    def admissible(self, version: int) -> int:
        """How many further items may start now. `version`: of the weights that their first tokens are drawn with."""
        new = self._slack(version)
        if new < 0:
            return 0
        if self.order != "window":
            # Places in order; what trains or fails only moves an item to an earlier batch.
            return max(0, (new + 1) * self.batch - self.outstanding)
        counts = Counter[int]({0: len(self._training)})
        for oldest, count in self._versions.items():
            counts[self._slack(oldest)] += count
        return orders.room(counts, new, self.batch)

    def start(self, count: int, version: int) -> list[int]:
        """Tickets for items that start now. Raises ValueError for more than `admissible`."""
        if not 0 <= count <= (free := self.admissible(version)):
            raise ValueError(f"{count} items cannot start at version {version}; {free} may")
        tickets = list(range(self._next, self._next + count))
        self._next += count
        self._running.update((ticket, version) for ticket in tickets)
        _change(self._versions, version, count)
        return tickets

    def finish(self, ticket: int, item: Item, oldest_version: int, tokens: int) -> bool:
        """An item has all its answers and rewards. `tokens`: how many the policy drew for it.

        False if it was dropped, because it is too stale (`order: discard` only). Raises ValueError for a ticket that
        is not running, or a version older than that of its start.
        """
        if oldest_version < (started := self._running.get(ticket, oldest_version)):
            raise ValueError(
                f"ticket {ticket} started at version {started}; no token of it is of version {oldest_version}"
            )
        self._end(ticket)
        if self._expired(oldest_version):
            self._count("stale", tokens)
            return False
        self._finished[ticket] = _Finished(item, oldest_version, tokens)
        self._add(oldest_version, 1)
        return True

    def fail(self, ticket: int, tokens: int = 0) -> None:
        """An item was lost, or stopped because it had expired; `tokens` were drawn. Its slot is released."""
        self._count("stale" if self._expired(self._end(ticket)) else "failed", tokens)

    def refuse(self, ticket: int, tokens: int) -> None:
        """An item finished and is not wanted: a filter drops it. Its slot is released, for another item to start."""
        self._end(ticket)
        self._count("refused", tokens)

    def expired(self) -> list[int]:
        """Running tickets that cannot be trained within the bound any more (`order: discard` only): stop them."""
        return [ticket for ticket, version in self._running.items() if self._expired(version)]

    def ready(self) -> bool:
        """Whether `take` has a batch."""
        if self._training or len(self._finished) < self.batch:
            return False
        if self.order == "fifo":
            return orders.fifo(self._running, self._finished, self.batch) is not None
        return self.order == "discard" or orders.window(
            self._versions,
            self._done,
            self.batch,
            start=self.version,
            bound=self.bound,
            updates=self.updates,
        )

    def take(self) -> list[Item]:
        """The next batch, in the order of tickets; call `trained` after its updates. Raises ValueError if there is
        none, or one is in training."""
        chosen = self._choose()
        if chosen is None:
            raise ValueError("no batch is ready; ask ready() first")
        self._training = {ticket: self._finished.pop(ticket) for ticket in sorted(chosen)}
        for done in self._training.values():
            self._add(done.oldest, -1)
        self._check(max(self._stale_by(done) for done in self._training.values()))
        return [done.item for done in self._training.values()]

    def trained(self, version: int | None = None) -> int:
        """The batch in training is trained: its slots are released. Returns how many finished items were dropped.

        `version`: the number of optimizer updates done now, if some were skipped. Raises ValueError if no batch is in
        training, or for a version that its updates do not lead to.
        """
        now = self.version + self.updates if version is None else version
        if not self._training or not self.version <= now <= self.version + self.updates:
            raise ValueError(
                f"version {now}: no batch in training leads there from {self.version} in {self.updates} updates"
            )
        histogram = Counter(self.counters.staleness)
        histogram.update(self._stale_by(done) for done in self._training.values())
        tally = self.counters.trained
        for done in self._training.values():
            tally = tally.plus(done.tokens)
        self.counters = replace(self.counters, trained=tally, staleness=dict(sorted(histogram.items())))
        self._training = {}
        self.version = now
        dropped = [ticket for ticket, done in self._finished.items() if self._expired(done.oldest)]
        for ticket in dropped:
            done = self._finished.pop(ticket)
            self._add(done.oldest, -1)
            self._count("stale", done.tokens)
        return len(dropped)

    def state(self, encode: Callable[[Item], Any] = lambda item: item) -> dict[str, Any]:
        """Plain JSON data for a checkpoint of this version. `encode`: makes an item such data.

        A batch in training counts as not trained: a trainer that resumes from this version trains it again.
        """
        # Those in training first, so that they are chosen again.
        finished = {**self._training, **self._finished}
        return {
            "batch": self.batch,
            "updates": self.updates,
            "staleness": self.staleness,
            "order": self.order,
            "version": self.version,
            "next": self._next,
            "running": [[ticket, version] for ticket, version in self._running.items()],
            "finished": [
                [ticket, done.oldest, done.tokens, encode(done.item)] for ticket, done in finished.items()
            ],
            "counters": self.counters.state(),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], decode: Callable[[Any], Item] = lambda item: item
    ) -> StalenessQueue[Item]:
        """The queue of which `state` was made. Running tickets still run: continue them, or `fail` them."""
        queue = cls(
            batch=state["batch"],
            updates=state["updates"],
            staleness=state["staleness"],
            order=state["order"],
            version=state["version"],
        )
        queue._next = state["next"]
        queue._running = dict(state["running"])
        queue._finished = {
            ticket: _Finished(decode(item), oldest, tokens)
            for ticket, oldest, tokens, item in state["finished"]
        }
        queue._versions = Counter(queue._running.values())
        for done in queue._finished.values():
            queue._add(done.oldest, 1)
        queue.counters = Counters.from_state(state["counters"])
        return queue

    def _choose(self) -> Sequence[int] | None:
        """The tickets of the next batch, if it is ready."""
        if not self.ready():
            return None
        if self.order == "fifo":
            return orders.fifo(self._running, self._finished, self.batch)
        return orders.earliest({ticket: done.oldest for ticket, done in self._finished.items()}, self.batch)

    def _slack(self, oldest: int) -> int:
        return orders.slack(oldest, self.version, self.bound, self.updates)

    def _stale_by(self, done: _Finished[Item]) -> int:
        return self.version + self.updates - 1 - done.oldest

    def _check(self, staleness: int) -> None:
        assert staleness <= self.bound, f"a batch is {staleness} updates stale; the bound is {self.bound}"

    def _expired(self, version: int) -> bool:
        return self._slack(version) < (1 if self._training else 0)

    def _end(self, ticket: int) -> int:
        if ticket not in self._running:
            raise ValueError(f"ticket {ticket} is not running; it never started, or it has ended")
        version = self._running.pop(ticket)
        _change(self._versions, version, -1)
        return version

    def _add(self, oldest: int, count: int) -> None:
        """Finished items of that version come or go."""
        for counter in (self._versions, self._done):
            _change(counter, oldest, count)

    def _count(self, name: str, tokens: int) -> None:
        self.counters = replace(self.counters, **{name: getattr(self.counters, name).plus(tokens)})


def _change(counter: Counter[int], key: int, count: int) -> None:
    """Versions without items are left out, so that a long run counts few of them."""
    counter[key] += count
    if not counter[key]:
        del counter[key]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Items, and the tokens that the policy drew for them."""

    items: int = 0
    tokens: int = 0

    def plus(self, tokens: int) -> Tally:
        """With one more item."""
        return Tally(items=self.items + 1, tokens=self.tokens + tokens)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Since the queue began, over restarts. Every item that started is running, finished, or counted here once."""

    trained: Tally = Tally()
    stale: Tally = Tally()
    """Dropped, because they could not be trained within the bound any more: only `order: discard` has them."""
    failed: Tally = Tally()
    """Lost with their worker."""
    refused: Tally = Tally()
    """Filtered out: their rewards have no variance, for example."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many trained items had each staleness, in optimizer updates."""

    @property
    def wasted_tokens(self) -> int:
        """Tokens that were drawn and not trained."""
        return self.stale.tokens + self.failed.tokens + self.refused.tokens

    @property
    def wasted_share(self) -> float:
        """Share of the tokens drawn so far that were not trained."""
        return self.wasted_tokens / max(1, self.wasted_tokens + self.trained.tokens)

    def state(self) -> dict[str, Any]:
        """Plain JSON data."""
        tallies = {name: [tally.items, tally.tokens] for name, tally in self._tallies().items()}
        return {**tallies, "staleness": {str(key): value for key, value in self.staleness.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """The counters of which `state` was made."""
        tallies = {name: Tally(items=state[name][0], tokens=state[name][1]) for name in Counters()._tallies()}
        return cls(staleness={int(key): value for key, value in state["staleness"].items()}, **tallies)

    def _tallies(self) -> dict[str, Tally]:
        return {
            "trained": self.trained,
            "stale": self.stale,
            "failed": self.failed,
            "refused": self.refused,
        }
