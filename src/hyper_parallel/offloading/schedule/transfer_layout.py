"""Layouts: live bytes under the selected transfers, kept up to date while the planner shifts them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Chosen, Flags, Floats, Gaps, Ints, LiveProfile
from hyper_parallel.offloading.schedule.problem import Move, Problem, Replayed
from hyper_parallel.simulator.host_queue import QueueClock


@dataclass(frozen=True)
class Times:
    """When the host is where: seconds at each place of two steps, as predicted."""

    arrives: Floats
    """The host comes there."""
    starts: Floats
    """The node there starts, after its waits."""
    step: float

    @classmethod
    def of(cls, arrives: Sequence[float] | Floats, starts: Sequence[float] | Floats) -> Times:
        """From those of one step, the step's end included."""
        step = float(arrives[-1])
        return cls(_twice(arrives), _twice(starts), step)

    @classmethod
    def replayed(cls, replay: Replayed) -> Times:
        """As they come to be."""
        return cls.of(replay.arrives, replay.starts)

    @classmethod
    def stalled(cls, problem: Problem, stalls: Floats) -> Times:
        """Of the problem with stalls before nodes."""
        starts = np.asarray(problem.starts) - problem.starts[0]
        until = np.append(np.cumsum(stalls), stalls.sum())
        later = starts + until
        return cls.of(later - np.append(stalls, 0.0), later)

    def comes(self, places: Ints) -> Floats:
        """When the host comes to places, also to those of the step before."""
        found: Floats = self.arrives[places % (self.arrives.size // 2)]
        return found + self.step * (places // (self.arrives.size // 2))


def _twice(times: Sequence[float] | Floats) -> Floats:
    step = np.asarray(times)
    return np.concatenate([step[:-1], step[:-1] + step[-1], [2 * step[-1]]])


class Layout:
    """Moves of the chosen gaps. The places of other gaps mean nothing, nor does `store` of who carries none."""

    def __init__(self, gaps: Gaps, base: Ints, budget: int, chosen: Chosen, leave: Ints, fetch: Ints) -> None:
        self.gaps, self.base, self.budget, self.chosen = gaps, base, budget, chosen
        self.leave, self.fetch = leave, fetch
        self.store: Ints = gaps.after.copy()
        self.since: Ints = gaps.since
        """Of each gap, from which place on a fetch finds what it is to bring."""
        self.count()

    def copy(self) -> Layout:
        """One that changes by itself."""
        other = object.__new__(Layout)
        other.gaps, other.base, other.budget, other.since = self.gaps, self.base, self.budget, self.since
        other.chosen = self.chosen.copy()
        other.leave, other.fetch, other.store = self.leave.copy(), self.fetch.copy(), self.store.copy()
        other.live = self.live.copy()
        return other

    def count(self) -> None:
        rows = self.rows
        absences = self.leave[rows], self.fetch[rows], -self.gaps.bytes[rows]
        self.live = LiveProfile(self.base).with_all(*absences)

    @property
    def rows(self) -> Ints:
        """Of the chosen gaps, ascending."""
        return np.flatnonzero(self.chosen.flags)

    @property
    def stores(self) -> Flags:
        """Which of them carry a store."""
        return self.gaps.stores(self.chosen.flags)

    def fits(self) -> bool:
        return self.live.peak <= self.budget

    def leave_at(self, row: int, place: int) -> None:
        """Leave earlier or later."""
        self.live.add(int(self.leave[row]), place, int(self.gaps.bytes[row]))
        self.leave[row] = place
        self.store[row] = min(int(self.store[row]), place)

    def fetch_at(self, row: int, place: int) -> None:
        """Come back earlier or later."""
        self.live.add(place, int(self.fetch[row]), int(self.gaps.bytes[row]))
        self.fetch[row] = place

    def drop(self, row: int) -> None:
        """Stay here instead."""
        self.live.add(int(self.leave[row]), int(self.fetch[row]), int(self.gaps.bytes[row]))
        self.chosen.drop(row)

    def join(self, row: int, leave: int, fetch: int) -> bool:
        """Go as well; False where no space has room."""
        if not self.chosen.add(row):
            return False
        self.leave[row], self.fetch[row] = leave, fetch
        self.live.add(leave, fetch, -int(self.gaps.bytes[row]))
        return True

    def moves(self, problem: Problem) -> tuple[Move, ...]:
        """In the order of places and storages."""
        gaps, stores = self.gaps, self.stores
        found = [
            Move(
                int(gaps.storage[row]),
                problem.spaces[int(self.chosen.space[row])].name,
                int(gaps.gap[row]),
                int(self.store[row]) if stores[row] else None,
                int(self.leave[row]),
                int(self.fetch[row]),
            )
            for row in self.rows.tolist()
        ]
        found.sort(
            key=lambda move: (move.leave if move.store is None else move.store, move.storage, move.gap)
        )
        return tuple(found)


# Incremental layout: a small plan under thousands of changes, with its step time kept up to date.
#
# `Layout` and `replay` are for plans of any size. Of a few dozen moves their arrays cost more than what is in them, so
# that here places are lists, the events of a step are kept in order and only those of changed moves are sorted in anew,
# and a run of the step is given up as soon as it waits for longer than is asked for.
#
# Times are those of `replay`, by the same clock: a step that begins with copies under way is never quicker than one
# that begins with none, so that the stall of the first of some steps in a row is never more than that of those that
# repeat.

STEPS = 16
"""After which the last one counts, though they do not repeat."""
CLOSE = 1e-9
"""Of a step: what is as near as this from one step to the next repeats."""
_STORE, _LEAVE, _FETCH, _USE, _UPDATE = range(5)
_HOST = -1
"""The queue of the host's updates; those of links are numbered from 0."""

_Event = tuple[int, int, int, int, float, int, float]
"""Place, what begins or is waited for there, how soon it is waited for, gap; seconds into the step, link, seconds."""


class Facts:
    """What does not change of a problem, in lists: of each gap, unless said otherwise."""

    def __init__(self, problem: Problem, gaps: Gaps) -> None:
        self.gaps, self.nodes = gaps, gaps.nodes
        self.step = problem.seconds
        self.seconds = [problem.comes(place) for place in range(2 * gaps.nodes + 1)]
        """Of each place of two steps: when the host comes there if nothing waits."""
        self.bytes: list[int] = gaps.bytes.tolist()
        self.open: list[int] = gaps.open.tolist()
        self.after: list[int] = gaps.after.tolist()
        self.used: list[int] = gaps.used.tolist()
        self.until: list[int] = gaps.until.tolist()
        self.since: list[int] = gaps.since.tolist()
        self.must: list[bool] = gaps.must.tolist()
        self.returns: list[bool] = gaps.returns.tolist()
        self.clean: list[bool] = gaps.clean.tolist()
        self.out: list[list[float]] = gaps.out.tolist()
        self.back: list[list[float]] = gaps.back.tolist()
        self.free = dict.fromkeys((_HOST, *range(2 * len(self.out))), 0.0)
        """The queues, as a run of the step begins."""
        alike = {version: rows[np.argsort(gaps.turn[rows])].tolist() for version, rows in gaps.alike.items()}
        self.alike: list[list[int]] = [alike[version] for version in gaps.version.tolist()]
        """The gaps of its version, in turn."""
        self.around: list[list[tuple[int, int]]] = [[] for _ in range(self.nodes)]
        """Of each node: the gaps that hold it, and its place in each."""
        for row, (after, used) in enumerate(zip(self.after, self.used, strict=True)):
            for at in range(after, used):
                self.around[at % self.nodes].append((row, at))


class Draft:
    """Moves of the chosen gaps; the places of others mean nothing. `layout` is left as it is."""

    def __init__(self, facts: Facts, layout: Layout) -> None:
        self.facts, self.budget = facts, layout.budget
        self.chosen: Chosen = layout.chosen
        self.taken: list[bool] = layout.chosen.flags.tolist()
        self.leave: list[int] = layout.leave.tolist()
        self.fetch: list[int] = layout.fetch.tolist()
        self.store: list[int] = layout.store.tolist()
        self.live = layout.live.copy()
        self.waits: list[int] = []
        """Gaps whose copies were waited for when the step was last run."""
        self._events: list[list[_Event]] = [[] for _ in self.taken]
        self._order: list[_Event] = []
        for place, seconds, gradient, parameter in facts.gaps.updates:
            self._order.append((place, _UPDATE, 0, parameter, facts.seconds[place], gradient, seconds))
        self._changed = {row for row, taken in enumerate(self.taken) if taken}

    def copy(self) -> Draft:
        """One that changes by itself."""
        other = object.__new__(Draft)
        other.facts, other.budget, other.chosen = self.facts, self.budget, self.chosen
        other.waits = self.waits
        other.taken, other.live = self.taken.copy(), self.live.copy()
        other.leave, other.fetch, other.store = self.leave.copy(), self.fetch.copy(), self.store.copy()
        other._events, other._order = self._events.copy(), self._order.copy()
        other._changed = self._changed.copy()
        return other

    def layout(self, like: Layout) -> Layout:
        """The same moves as arrays; `like`: one of the same problem."""
        other = like.copy()
        other.chosen = self.chosen.copy()
        other.leave, other.fetch, other.store = (
            np.array(places, dtype=np.int64) for places in (self.leave, self.fetch, self.store)
        )
        other.count()
        return other

    def leave_at(self, row: int, place: int) -> None:
        """Leave earlier or later."""
        self.live.add(self.leave[row], place, self.facts.bytes[row])
        self.leave[row] = place
        self.store[row] = min(self.store[row], place)
        self._changed.add(row)

    def fetch_at(self, row: int, place: int) -> None:
        """Come back earlier or later."""
        self.live.add(place, self.fetch[row], self.facts.bytes[row])
        self.fetch[row] = place
        self._changed.add(row)

    def store_at(self, row: int, place: int) -> None:
        """Begin the copy out earlier or later."""
        self.store[row] = place
        self._changed.add(row)

    def drop(self, row: int) -> None:
        """Stay here instead."""
        self.live.add(self.leave[row], self.fetch[row], self.facts.bytes[row])
        self.taken[row] = False
        self.chosen = self.chosen.copy()
        self.chosen.drop(row)
        self._changed.update(self.facts.alike[row])

    def join(self, row: int, store: int, leave: int, fetch: int) -> bool:
        """Go as well; False where no space has room."""
        chosen = self.chosen.copy()
        if not chosen.add(row):
            return False
        self.chosen, self.taken[row] = chosen, True
        self.store[row], self.leave[row], self.fetch[row] = store, leave, fetch
        self.live.add(leave, fetch, -self.facts.bytes[row])
        # Where there is not room for all, a storage's other gaps may have to go to another space with it.
        self._changed.update(self.facts.alike[row] if chosen.ample else self.rows)
        return True

    @property
    def rows(self) -> list[int]:
        """The chosen gaps, ascending."""
        return [row for row, taken in enumerate(self.taken) if taken]

    def carries(self, row: int) -> bool:
        """Whether a chosen gap carries the store of its version."""
        facts = self.facts
        return not facts.clean[row] and next(one for one in facts.alike[row] if self.taken[one]) == row

    def latest(self, row: int, last: int) -> int:
        """The place up to `last` until which it could stay before it leaves."""
        return self.live.first_over(self.leave[row], last, self.budget - self.facts.bytes[row])

    def earliest(self, row: int, first: int) -> int:
        """The place from `first` on from which it could be here again."""
        return self.live.under_from(first, self.fetch[row], self.budget - self.facts.bytes[row])

    def stall(self, most: float = math.inf) -> tuple[float, int]:
        """Seconds of a step in which nodes wait, infinity where they are more than `most`; and events looked at."""
        self._sort()
        facts, order = self.facts, self._order
        step, count = facts.step, len(self.taken)
        out, back, worked = [0.0] * count, [0.0] * count, [0.0] * count
        clock: QueueClock[int] = QueueClock()
        clock.free = facts.free.copy()
        begin = clock.begin
        since, before = 0.0, [-1.0]
        stall, work = 0.0, 0
        for _ in range(STEPS):
            work += len(order)
            stall, waits = 0.0, []
            for _, what, _, row, at, link, taken in order:
                clock.now = now = since + at + stall
                if what == _STORE:
                    out[row] = begin(link, taken)
                elif what == _FETCH:
                    back[row] = begin(link, taken, worked[row])
                elif what == _UPDATE:
                    worked[row] = begin(_HOST, taken, out[link])
                else:
                    over = back[row] if what == _USE else out[row]
                    if over > now:  # most are over
                        stall += clock.wait(over)
                        if stall > most:
                            return math.inf, work
                        waits.append(row)
            since += step + stall
            # What decides the next step: what the links and the host still have to do.
            left = [stall, *(max(0.0, until - since) for until in clock.free.values())]
            if not any(left[1:]) or all(
                abs(one - other) <= CLOSE * step for one, other in zip(left, before, strict=False)
            ):
                break
            before = left
        self.waits = waits
        return stall, work

    def _sort(self) -> None:
        """Bring the events of changed gaps into their order."""
        order = self._order
        for row in self._changed:
            for event in self._events[row]:
                del order[bisect_left(order, event)]
            self._events[row] = found = self._of(row) if self.taken[row] else []
            for event in found:
                insort(order, event)
        self._changed.clear()

    def _of(self, row: int) -> list[_Event]:
        facts, n = self.facts, self.facts.nodes
        leave, fetch, used, seconds = self.leave[row], self.fetch[row], self.facts.used[row], facts.seconds
        space = int(self.chosen.space[row])
        found: list[_Event] = []
        if self.carries(row):
            store = self.store[row]
            at, taken = store % n, facts.out[space][row]
            found.append((at, _STORE, leave - store, row, seconds[at], 2 * space, taken))
            found.append((leave % n, _LEAVE, 0, row, seconds[leave % n], 0, 0.0))
        if facts.returns[row]:
            at, taken = fetch % n, facts.back[space][row]
            found.append((at, _FETCH, used - fetch, row, seconds[at], 2 * space + 1, taken))
            found.append((used % n, _USE, 0, row, seconds[used % n], 0, 0.0))
        return found
