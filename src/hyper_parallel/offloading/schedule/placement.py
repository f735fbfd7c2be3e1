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
first in, first out is that of `simulator.queue_clock`, with a host that arrives when the times say and not when waits
let it; latest starts (`_fetches`) run it backwards.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Floats, Ints
from hyper_parallel.offloading.schedule.idle_intervals import Gaps
from hyper_parallel.offloading.schedule.selection import Chosen
from hyper_parallel.offloading.schedule.transfer_layout import Layout, Times
from hyper_parallel.simulator.queue_clock import QueueClock

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
    gaps, n = layout.gaps, layout.gaps.nodes
    closed = np.zeros(len(gaps), dtype=bool)
    node = 0
    while True:
        node = layout.live.first_over(node, n, layout.budget)
        if node >= n:
            return True
        ends = np.flatnonzero(layout.live.at[node:] <= layout.budget)
        until = int(ends[0]) if ends.size else n - node
        at = np.where(gaps.after <= node, node, node + n)
        at = np.where(at < gaps.used, at, node + n)
        inside = (gaps.after <= at) & (at < gaps.used) & ~closed
        flags = layout.chosen.flags
        late = inside & flags & (at < layout.leave)
        early = inside & flags & (at >= layout.fetch)
        rows = np.flatnonzero(late | early | (inside & ~flags))
        if not rows.size:
            return False
        place = at[rows]
        back = np.minimum(place + until, gaps.used[rows])
        space = layout.chosen.space[rows]
        out, come = gaps.out[space, rows], gaps.back[space, rows]
        lateness = np.maximum(0.0, times.arrives[back] + come - times.starts[gaps.used[rows]])
        sooner = np.maximum(0.0, stored[rows] - times.starts[place])
        fresh = np.maximum(0.0, out - (times.starts[place] - times.comes(gaps.open[rows])))
        # Traffic counts too where nobody waits for it now.
        wait = np.where(late[rows], sooner, np.where(early[rows], lateness, fresh + lateness + out + come))
        needed = float(layout.live.at[node] - layout.budget)
        price = wait / np.minimum(gaps.bytes[rows], needed)
        best = int(np.lexsort((place - gaps.used[rows], price))[0])
        row = int(rows[best])
        if late[row]:
            layout.leave_at(row, int(place[best]))
        elif early[row]:
            layout.fetch_at(row, int(back[best]))
        elif not layout.join(row, int(place[best]), int(back[best])):
            closed[row] = True


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
