"""Earliest-deadline-first scheduling of stores and evictions, by simulating the step.

An idle link to a tier begins, of the stores that may begin, the one with the earliest deadline (Jackson 1955): the
place from which its storage is idle. So an idle storage waits for at most one store of a storage that is still in use,
and a storage whose content is final early is evicted as soon as it is idle.

The budget needs bytes, from any storage, so the host always waits for the store that ends first. The simulation runs
several steps, since copies of one step may still be under way in the next, and the last step counts.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.transfer_layout import Layout
from hyper_parallel.simulator.queue_clock import QueueClock

STEPS = 3
"""Simulated steps: enough for a late copy to delay one of the next step, which delays one of the step after."""


def edf_schedule(problem: Problem, layout: Layout) -> bool:
    """Set the stores and evictions of `layout`; False, without a change, where that would exceed the budget."""
    store, leave = layout.store.copy(), layout.leave.copy()
    _Run(problem, layout).go()
    layout.store[:] = np.minimum(layout.store, layout.leave)
    layout.count()
    if layout.fits():
        return True
    layout.store[:], layout.leave[:] = store, leave
    layout.count()
    return False


class _Open(NamedTuple):
    """A store that may begin. The least one begins first."""

    idle: int
    """Place from which on the storage is not in use."""
    used: int
    row: int
    base: int
    """Place 0 of the step that its gap is counted in."""


class _Under(NamedTuple):
    """A store under way."""

    over: float
    row: int
    base: int


class _Run:
    """Several steps, node by node. Places count on from each step into the next one."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        gaps, n = layout.gaps, layout.gaps.nodes
        self._layout, self._seconds = layout, np.diff(problem.starts).tolist()
        self._begin, self._fetch, self._use = (defaultdict[int, list[int]](list) for _ in range(3))
        rows = layout.rows
        for row in rows[np.lexsort((rows, gaps.used[rows] - layout.fetch[rows]))].tolist():
            self._fetch[int(layout.fetch[row]) % n].append(row)
            if gaps.returns[row]:
                self._use[int(gaps.first_use[row])].append(row)
        for row in rows[layout.stores[rows]].tolist():
            self._begin[int(gaps.open[row]) % n].append(row)
        stored = np.flatnonzero(layout.stores)
        there = layout.live.with_all(layout.leave[stored], layout.fetch[stored], gaps.bytes[stored])
        self._over = (there.at - layout.budget).tolist()
        """Bytes over the budget at each node if nobody left who has to be stored."""
        self._sizes, self._spaces = gaps.bytes.tolist(), layout.chosen.space.tolist()
        self._opens, self._after, self._used = gaps.open.tolist(), gaps.after.tolist(), gaps.used.tolist()
        self._seconds_out, self._back = gaps.out.tolist(), gaps.back.tolist()
        self._last = np.minimum(layout.fetch - 1, gaps.until).tolist()
        self._updates = {update[0]: update for update in gaps.updates}
        self._stored: dict[int, float] = {}
        """Of each row, when its store is over."""
        self._away = 0
        self._gone: set[int] = set()
        self._host: QueueClock[int | None] = QueueClock()
        """The step; its queues are the links back, by their spaces, and the host's updates (None)."""
        self._out: QueueClock[int] = QueueClock()
        """The links out, as of when the host came to the node at hand: it may wait there for what began then."""
        self._out.free = dict.fromkeys(range(len(problem.spaces)), 0.0)
        self._open: list[list[_Open]] = [[] for _ in problem.spaces]
        self._waiting = 0
        """How many those are."""
        self._under: list[_Under] = []
        """Of storages that are idle; what is over first comes first."""
        self._early: dict[int, list[_Under]] = defaultdict(list)
        """Of storages that are in use still, by the place at which they are idle."""

    def go(self) -> None:
        """Run them."""
        n = self._layout.gaps.nodes
        host = self._host
        here: dict[int, float] = {}
        """Of each row, when its fetch is over."""
        done: dict[int, float] = {}
        """Of each row, when the host has done what its fetch brings."""
        eventful = {*self._begin, *self._fetch, *self._use, *self._updates}
        for at in range(STEPS * n):
            node = at % n
            self._out.now = host.now
            if node not in eventful and at not in self._early:
                # Most nodes: nothing changes but the time, and what its passing allows.
                while (self._under or self._waiting) and self._leaves(at, self._away < self._over[node]):
                    self._fill(at, host.now)
                host.run(self._seconds[node])
                self._fill(at, host.now)
                continue
            for row in self._fetch.get(node, ()):
                if row in self._gone:
                    self._gone.discard(row)
                    self._away -= self._sizes[row]
            for row in self._begin.get(node, ()):
                base = at - self._opens[row]
                one = _Open(base + self._after[row], base + self._used[row], row, base)
                heappush(self._open[self._spaces[row]], one)
                self._waiting += 1
            for under in self._early.pop(at, ()):
                heappush(self._under, under)
            self._fill(at, host.now)
            while self._leaves(at, self._away < self._over[node]):
                self._fill(at, host.now)
            for row in self._fetch.get(node, ()):
                space = self._spaces[row]
                here[row] = host.begin(space, self._back[space][row], done.get(row, 0.0))
            for row in self._use.get(node, ()):
                host.wait(here.get(row, 0.0))
            if node in self._updates:
                _, seconds, gradient, parameter = self._updates[node]
                done[parameter] = host.begin(None, seconds, self._stored.get(gradient, 0.0))
            host.run(self._seconds[node])
            self._fill(at, host.now)

    def _fill(self, at: int, until: float) -> None:
        """Begin stores while a link out would be idle before a time."""
        free = self._out.free
        if not self._waiting or min(free.values()) >= until:
            return
        for space, waiting in enumerate(self._open):
            while waiting and free[space] < until:
                self._store(space, at)

    def _store(self, space: int, at: int) -> None:
        """Begin the store that is needed first, at a place."""
        one = heappop(self._open[space])
        self._waiting -= 1
        self._layout.store[one.row] = at - one.base
        self._stored[one.row] = over = self._out.begin(space, self._seconds_out[space][one.row])
        under = _Under(over, one.row, one.base)
        if one.idle <= at:
            heappush(self._under, under)
        else:
            self._early[one.idle].append(under)

    def _leaves(self, at: int, needed: bool) -> bool:
        """Let one leave that is stored, or has to leave; False where there is none."""
        if not self._under:
            waiting = [
                (self._out.end(space, self._seconds_out[space][queue[0].row]), space)
                for space, queue in enumerate(self._open)
                if queue
                and queue[0].idle <= at
                and (needed or at >= queue[0].base + self._last[queue[0].row])
            ]
            if not waiting:
                return False
            self._store(min(waiting)[1], at)
        over, row, base = self._under[0]
        last = base + self._last[row]
        if over > self._host.now and not needed and at < last:
            return False
        heappop(self._under)
        if at <= last:
            self._host.wait(over)
            self._gone.add(row)
            self._away += self._sizes[row]
            self._layout.leave[row] = at - base
        return True
