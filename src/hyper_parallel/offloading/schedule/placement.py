"""Placement of transfers: the node at which each store and load starts and ends.

From a guess of the times: a store begins as soon as its link and what is needed sooner allow, perhaps long before its
storage is idle; the storage leaves at the first node that starts after the copy. A fetch begins as late as its link
allows with everything in time, served in the order of the next uses. In between a storage is away. Then, in this order:

    `repair`   where a node exceeds the budget still, something leaves earlier, comes back later, or goes as well
    `edf_schedule` leaves are found anew by running the step: wait only where memory asks for it, else leave when stored
    `prune`    what the budget does not need stays
    `advance`  fetches begin as soon as their link is idle and memory allows, in the order of the next uses
    `delay`    who would be waited for leaves later, where memory allows

Live bytes are exact at every stage. Each stage takes the times as given; `replay` says what they become. The links'
first in, first out is that of `simulator.host_queue`, with a host that arrives when the times say and not when waits
let it; latest starts (`_fetches`) run it backwards.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Chosen, Flags, Floats, Gaps, Ints
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.transfer_layout import Layout, Times
from hyper_parallel.simulator.host_queue import QueueClock

_TINY = 1e-12


def guess(gaps: Gaps, base: Ints, budget: int, chosen: Chosen, times: Times) -> tuple[Layout, Floats]:
    """A layout whose copies hide as far as the links allow, over the budget perhaps; and when each store is over."""
    rows = np.flatnonzero(chosen.flags)
    begun, stored = _stores(gaps, chosen, times)
    leave = np.searchsorted(times.starts, stored - _TINY)
    leave = np.minimum(np.maximum(leave, gaps.after), gaps.until)
    fetch = np.searchsorted(times.arrives, _fetches(gaps, chosen, times) + _TINY, "right") - 1
    since = _since(gaps, stored, times)
    fetch[rows] = np.clip(fetch[rows], np.maximum(leave + 1, since)[rows], gaps.used[rows])
    layout = Layout(gaps, base, budget, chosen, leave, fetch)
    layout.since = since
    # Of the step before, at places before its end.
    before = np.where(begun < 0, 1, 0)
    store = (
        np.searchsorted(times.arrives, begun + before * times.step + _TINY, "right") - 1 - before * gaps.nodes
    )
    layout.store[rows] = np.clip(store, gaps.open, leave)[rows]
    return layout, stored


def _stores(gaps: Gaps, chosen: Chosen, times: Times) -> tuple[Floats, Floats]:
    """When each gap's store begins, and when it is over: what is idle first goes first (`edf_schedule`)."""
    begins, ends = times.arrives[gaps.after].copy(), times.arrives[gaps.after].copy()
    stores = np.flatnonzero(gaps.stores(chosen.flags))
    for space in np.unique(chosen.space[stores]).tolist():
        rows = stores[chosen.space[stores] == space]
        # By when each may begin, as if all did so in one step; then once more, behind what that one left over.
        shift = gaps.open[rows] // gaps.nodes * times.step
        opens, idle = times.comes(gaps.open[rows]) - shift, times.arrives[gaps.after[rows]] - shift
        order = np.lexsort((rows, opens))
        jobs = list(
            zip(
                np.concatenate([opens[order], opens[order] + times.step]).tolist(),
                np.concatenate([idle[order], idle[order] + times.step]).tolist(),
                np.tile(gaps.used[rows[order]], 2).tolist(),
                np.tile(order, 2).tolist(),
                strict=True,
            )
        )
        taken = gaps.out[space, rows].tolist()
        begun, over = np.empty(rows.size), np.empty(rows.size)
        at = 0
        link: QueueClock[None] = QueueClock()
        link.now = -np.inf
        waiting: list[tuple[float, int, int]] = []
        while at < len(jobs) or waiting:
            if not waiting:
                link.wait(jobs[at][0])
            while at < len(jobs) and jobs[at][0] <= link.now:
                heappush(waiting, jobs[at][1:])
                at += 1
            one = heappop(waiting)[2]
            # The later of its two turns stays.
            begun[one] = link.now
            link.run(taken[one])
            over[one] = link.now
        begins[rows], ends[rows] = begun - times.step + shift, over - times.step + shift
    return begins, ends


def _since(gaps: Gaps, stored: Floats, times: Times) -> Ints:
    """From which place on the host has done what a fetch brings: end = max(arrival, gradient, end before) + seconds."""
    found = gaps.since.copy()
    host: QueueClock[None] = QueueClock()
    # Twice, so that what the step before left over is in the way.
    for _ in range(2 if gaps.updates else 0):
        host.shift(times.step)
        for place, seconds, gradient, parameter in gaps.updates:
            host.now = float(times.arrives[place])
            over = host.begin(None, seconds, float(stored[gradient]))
            done = int(np.searchsorted(times.arrives, over - _TINY))
            found[parameter] = np.clip(done, gaps.since[parameter], gaps.used[parameter])
    return found


def _fetches(gaps: Gaps, chosen: Chosen, times: Times) -> Floats:
    """When each fetch must begin at the latest: begin = min(next use, begin of the fetch behind it) − seconds."""
    found = times.starts[gaps.used].copy()
    chosen_rows = np.flatnonzero(chosen.flags & gaps.returns)
    for space in np.unique(chosen.space[chosen_rows]).tolist():
        rows = chosen_rows[chosen.space[chosen_rows] == space]
        order = rows[np.lexsort((gaps.storage[rows], gaps.first_use[rows]))]
        end, taken = times.starts[gaps.first_use[order]], gaps.back[space, order]
        end = np.concatenate([end, end + times.step])[::-1]
        taken = np.concatenate([taken, taken])[::-1]
        sums = np.cumsum(taken)
        begins = (np.minimum.accumulate(end + sums - taken) - sums)[::-1][: order.size]
        found[order] = np.where(gaps.used[order] >= gaps.nodes, begins + times.step, begins)
    return found


def repair(layout: Layout, times: Times, stored: Floats) -> bool:
    """Bring every node under the budget; False where the spaces have no room for what would have to leave."""
    n, node = layout.gaps.nodes, 0
    closed = np.zeros(len(layout.gaps), dtype=bool)
    while True:
        node = layout.live.first_over(node, n, layout.budget)
        if node >= n:
            return True
        ways = _Ways(layout, times, stored, closed, node)
        while layout.live.at[node] > layout.budget:
            if not ways.take(closed):
                return False


class _Ways:
    """Ways in which gaps at a node could have their storage away there. None comes twice, as taking one settles it."""

    def __init__(self, layout: Layout, times: Times, stored: Floats, closed: Flags, node: int) -> None:
        gaps, n = layout.gaps, layout.gaps.nodes
        self._layout, self._times, self._node = layout, times, node
        near = gaps.near(node)
        after, used = gaps.after[near], gaps.used[near]
        at = np.where(after <= node, node, node + n)
        at = np.where(at < used, at, node + n)
        inside = (after <= at) & (at < used) & ~closed[near]
        chosen = layout.chosen.flags[near]
        late = inside & chosen & (at < layout.leave[near])
        early = inside & chosen & (at >= layout.fetch[near])
        some = np.flatnonzero(late | early | (inside & ~chosen))
        self._rows, self._place, self._late, self._early = near[some], at[some], late[some], early[some]
        rows, space = self._rows, layout.chosen.space[self._rows]
        self._used, self._sizes = gaps.used[rows], gaps.bytes[rows]
        out, self._come = gaps.out[space, rows], gaps.back[space, rows]
        self._due = times.starts[self._used]
        self._sooner = np.maximum(0.0, stored[rows] - times.starts[self._place])
        fresh = np.maximum(0.0, out - (times.starts[self._place] - times.comes(gaps.open[rows])))
        # Traffic counts too where nobody waits for it now.
        self._fresh = (fresh, out)
        self._until = n - node + 1
        """How many nodes exceed from here on; more than there are before the first way is taken."""
        self._left = np.ones(rows.size, dtype=bool)

    def take(self, closed: Flags) -> bool:
        """Take the way with the least waiting for its bytes; False where none is left."""
        if not self._left.any():
            return False
        layout, node = self._layout, self._node
        under = layout.live.at[node : node + self._until] <= layout.budget
        until = int(under.argmax()) if under.any() else under.size
        if until != self._until:
            self._until, self._back = until, np.minimum(self._place + until, self._used)
            lateness = np.maximum(0.0, self._times.arrives[self._back] + self._come - self._due)
            fresh, out = self._fresh
            joined = fresh + lateness + out + self._come
            self._wait = np.where(self._late, self._sooner, np.where(self._early, lateness, joined))
        needed = float(layout.live.at[node] - layout.budget)
        price = np.where(self._left, self._wait / np.minimum(self._sizes, needed), np.inf)
        ties = np.flatnonzero(price == price.min())
        best = int(ties[(self._place[ties] - self._used[ties]).argmin()])
        self._left[best] = False
        row, place, back = int(self._rows[best]), int(self._place[best]), int(self._back[best])
        if self._late[best]:
            layout.leave_at(row, place)
        elif self._early[best]:
            layout.fetch_at(row, back)
        elif not layout.join(row, place, back):
            closed[row] = True
        return True


def prune(layout: Layout) -> int:
    """Let stay what the budget does not need away, the shortest absences first; how many stay."""
    rows = layout.rows[~layout.gaps.must[layout.rows]]
    dropped = 0
    away = layout.fetch[rows] - layout.leave[rows]
    for row in rows[np.lexsort((rows, away))].tolist():
        most = layout.live.most(int(layout.leave[row]), int(layout.fetch[row]))
        if most + int(layout.gaps.bytes[row]) <= layout.budget:
            layout.drop(row)
            dropped += 1
    return dropped


def advance(layout: Layout, times: Times) -> None:
    """Begin fetches as soon as memory and their link allow, in the order of the next uses."""
    gaps, n = layout.gaps, layout.gaps.nodes
    rows = layout.rows[gaps.returns[layout.rows]]
    links: QueueClock[int] = QueueClock()
    links.free = dict.fromkeys(range(len(gaps.back)), -np.inf)
    for _ in range(2):
        for row in rows[np.lexsort((gaps.storage[rows], gaps.first_use[rows]))].tolist():
            space = int(layout.chosen.space[row])
            ahead = times.step if gaps.used[row] >= n else 0.0
            fetch = int(layout.fetch[row])
            soonest = int(np.searchsorted(times.arrives, links.free[space] + ahead, "right")) - 1
            soonest = max(soonest, int(layout.leave[row]) + 1, int(layout.since[row]))
            if soonest < fetch:
                fetch = layout.live.under_from(soonest, fetch, layout.budget - int(gaps.bytes[row]))
                layout.fetch_at(row, fetch)
            links.now = float(times.arrives[fetch]) - ahead
            links.begin(space, float(gaps.back[space, row]))
        # Once more behind what the step before leaves under way.
        links.shift(times.step)


def delay(layout: Layout, times: Times, stored: Floats) -> None:
    """Let who leaves before it is stored leave later, where memory allows."""
    gaps = layout.gaps
    rows = np.flatnonzero(layout.stores)
    for row in rows[np.lexsort((rows, stored[rows]))].tolist():
        leave = int(layout.leave[row])
        wanted = int(np.searchsorted(times.starts, stored[row] - _TINY))
        wanted = min(wanted, int(layout.fetch[row]) - 1, int(gaps.until[row]))
        place = layout.live.first_over(leave, wanted, layout.budget - int(gaps.bytes[row]))
        if place > leave:
            layout.leave_at(row, place)


# Earliest-deadline-first scheduling of stores and evictions, by simulating the step.
#
# An idle link to a tier begins, of the stores that may begin, the one with the earliest deadline (Jackson 1955): the
# place from which its storage is idle. So an idle storage waits for at most one store of a storage that is still in
# use, and a storage whose content is final early is evicted as soon as it is idle.
#
# The budget needs bytes, from any storage, so the host always waits for the store that ends first. The simulation runs
# several steps, since copies of one step may still be under way in the next, and the last step counts.

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
