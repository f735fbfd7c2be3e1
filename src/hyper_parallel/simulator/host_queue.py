"""Host queue: when the host enqueues each op of a class, if it takes time to do so.

A framework's host goes through a step in the order of its code and enqueues kernels, collectives and copies, ℓ seconds
each (`Device.host_launch`); an operator of several kernels has as many launches (`Device.host_kernels`). It runs
ahead of the device until it reads a number that the device computes (an op of kind ``host``), where it waits:

    enqueued(i) = end(s) + ℓ · (launches behind s up to i)        s: the last op before i at which the host waited, or
                                                                  the step's begin
    start(i)    ≥ enqueued(i)

So a step of small kernels takes as long as its launches, and one of large kernels as long as its kernels. The depth of
the device's own queue is not limited. One addition for each op.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from hyper_parallel.trace import Op


class HostQueue:
    """The hosts of all classes of a Trace. Ops of all classes are numbered consecutively, as in `Run`."""

    def __init__(
        self, classes: Iterable[Sequence[Op]], seconds: float, kernels: Mapping[str, float] | None = None
    ) -> None:
        """`seconds`: of one launch; `kernels`: launches by an op's name, 1 where it is not named."""
        kernels = kernels or {}
        self._seconds = seconds
        self._behind: list[float] = []
        """By op: seconds of launches of its class up to it."""
        self._class: list[int] = []
        self._since: list[float] = []
        """By class: when the host last went on, less the seconds of launches up to there."""
        for place, ops in enumerate(classes):
            behind = 0.0
            for op in ops:
                behind += seconds * kernels.get(op.name, 1.0) if _is_launched(op) else 0.0
                self._behind.append(behind)
                self._class.append(place)
            self._since.append(0.0)

    def enqueued(self, number: int) -> float:
        """When an op is enqueued, by the latest wait of its host."""
        return self._since[self._class[number]] + self._behind[number]

    def wait(self, number: int, end: float) -> None:
        """Let the host go on at the end of the op that it waited for."""
        self._since[self._class[number]] = end - self._behind[number]


def is_waited_for(op: Op) -> bool:
    """Whether the host waits for the op's end before it goes on."""
    return op.work is not None and op.work.kind == "host"


def _is_launched(op: Op) -> bool:
    return op.collective is not None or (op.work is not None and op.work.kind not in ("host", "view"))


# Bandwidth sharing among concurrent transfers.
#
# Each transfer runs at a rate between 0 and 1 of its speed alone, and uses a share w of each resource (a link level of
# a device, one direction of a tier) per unit of rate. Rates are max-min fair: all grow together until a resource is
# full; the transfers on it stop there, and the others continue to grow (progressive filling: Bertsekas and Gallager,
# *Data Networks*, 2nd edition, 1992, section 6.5.2).
#
#     Σ_transfers w · rate ≤ 1        on every resource                              `fair`

Resource = Hashable
T = TypeVar("T", bound=Hashable)


def fair(uses: Mapping[T, Mapping[Resource, float]]) -> dict[T, float]:
    """The rate of each transfer, given the share of each resource that it uses when alone.

    >>> fair({"a": {"link": 1.0}, "b": {"link": 1.0}, "c": {"bus": 0.5}})
    {'c': 1.0, 'a': 0.5, 'b': 0.5}
    """
    rates: dict[T, float] = {}
    growing = dict(uses)
    left: dict[Resource, float] = {resource: 1.0 for use in uses.values() for resource in use}
    rate = 0.0
    while growing:
        loads: dict[Resource, float] = {}
        for use in growing.values():
            for resource, share in use.items():
                loads[resource] = loads.get(resource, 0.0) + share
        room = {resource: left[resource] / load for resource, load in loads.items() if load}
        step = min([1.0 - rate, *room.values()])
        rate += step
        for resource, load in loads.items():
            left[resource] -= step * load
        full = {resource for resource, most in room.items() if most == step}
        done = [one for one, use in growing.items() if rate >= 1.0 or any(use[r] and r in full for r in use)]
        for one in done:
            rates[one] = rate
            del growing[one]
    return rates


class Sharing(Generic[T]):
    """The running transfers. A change recomputes only the rates of transfers that share resources with it."""

    def __init__(self) -> None:
        self._uses: dict[T, Mapping[Resource, float]] = {}
        self._users: dict[Resource, dict[T, None]] = {}

    def add(self, one: T, use: Mapping[Resource, float]) -> dict[T, float]:
        """Begin a transfer; returns the new rates of it and of all transfers that share resources with it."""
        self._uses[one] = use
        alone = True
        for resource in use:
            users = self._users.setdefault(resource, {})
            alone = alone and not users
            users[one] = None
        return {one: 1.0} if alone else self._rates([one])

    def remove(self, one: T) -> dict[T, float]:
        """End a transfer; returns the new rates of all transfers that shared resources with it."""
        others: dict[T, None] = {}
        for resource in self._uses.pop(one):
            users = self._users[resource]
            del users[one]
            others.update(users)
        return self._rates(others) if others else {}

    def _rates(self, changed: Iterable[T]) -> dict[T, float]:
        reached: dict[T, Mapping[Resource, float]] = {}
        todo = list(changed)
        while todo:
            one = todo.pop()
            if one not in reached:
                reached[one] = self._uses[one]
                for resource in reached[one]:
                    todo.extend(self._users[resource])
        return fair(reached)


# Queue clock: when one program's transfers end, on queues that are first in, first out and share nothing.
#
# A program (the host, or the list that a device is given) does one thing after the other. On the way it begins
# transfers and collectives on queues, which run beside it, and waits for some of them:
#
#     end = max(now, end of the one before it on its queue, what it needs) + seconds
# `QueueClock.begin`
#     now = max(now, end of what is waited for)                                                        `QueueClock.wait`
#     now = now + seconds, `slowdown` times as long where a queue is busy as it starts                  `QueueClock.run`
#
# This is `simulator.engine` for a trace of one rank class in which no two transfers share a link, and kernels take as
# long beside collectives as alone: there both give the same times. It costs a few additions for each transfer instead
# of events, so that schedulers can ask it thousands of times. All that say when a transfer ends ask it: `replay` of an
# offload plan, the search for leaves (`edf_schedule`), the placement's links, and list scheduling. Links that are
# fluids (`greedy_selection`) and latest starts (`placement`) are relaxations: they say what to begin with, and not when
# something ends.

Q = TypeVar("Q", bound=Hashable)

_EVER = -math.inf


class QueueClock(Generic[Q]):
    """The time of one program, and when each of its queues is free."""

    __slots__ = ("free", "now", "slowdown")

    def __init__(self, slowdown: float = 1.0) -> None:
        self.now = 0.0
        """Seconds: what the program does next, it does then."""
        self.free: dict[Q, float] = {}
        """When what was begun on each queue has ended; a queue on which nothing was begun is free."""
        self.slowdown = slowdown
        """How many times as long a kernel takes beside a transfer."""

    def end(self, queue: Q, seconds: float, after: float = _EVER) -> float:
        """When a transfer that needs what ends `after` would end, if it were begun now."""
        # Comparisons, since `max` takes three times as long, and solvers come here millions of times.
        start = self.free.get(queue, _EVER)
        if start < self.now:
            start = self.now
        if start < after:
            start = after
        return start + seconds

    def begin(self, queue: Q, seconds: float, after: float = _EVER) -> float:
        """Begin a transfer that needs what ends `after`; when it ends."""
        start = self.free.get(queue, _EVER)
        if start < self.now:
            start = self.now
        if start < after:
            start = after
        self.free[queue] = end = start + seconds
        return end

    def wait(self, end: float) -> float:
        """Wait for what ends then; for how many seconds."""
        late = end - self.now
        if late <= 0:
            return 0.0
        self.now = end
        return late

    def run(self, seconds: float) -> None:
        """Run a kernel."""
        if self.slowdown != 1.0 and self.free and max(self.free.values()) > self.now:
            seconds *= self.slowdown
        self.now += seconds

    def shift(self, seconds: float) -> None:
        """Move the origin of time `seconds` later, for the next of several steps."""
        self.now -= seconds
        for queue in self.free:
            self.free[queue] -= seconds
