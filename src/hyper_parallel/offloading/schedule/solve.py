"""Offload scheduler: chooses which storages move, where and when, under a budget in bytes.

1. `floor`: what cannot be met is refused, and what can be is met.
2. `greedy_selection` chooses gaps, in a few tastes; none is best for all problems.
3. `placement` finds the places of their moves, and `replay` says how long the step takes with them. With the times that
   come out the places are found again, while that helps. A store begins as soon as what it copies is final and the
   link has nothing more urgent to do; where a few large copies would be in the way, only when its storage is idle.
4. The best plan is improved: a few of its gaps are given up, the planner mends the hole, and what is better stays.

All is exact where it comes to bytes, and decided by `replay` where it comes to time. The same problem gives the same
plan in every process: there are no clocks and no hashes in it, and ties are broken by the storages' numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading.schedule.greedy_selection import ROWS, Cover, HeuristicWeights
from hyper_parallel.offloading.schedule.idle_intervals import Chosen, Gaps, Ints, gaps_of
from hyper_parallel.offloading.schedule.placement import advance, delay, edf_schedule, guess, prune, repair
from hyper_parallel.offloading.schedule.problem import Move, Plan, Problem, Replayed, replay
from hyper_parallel.offloading.schedule.transfer_layout import Layout, Times
from hyper_parallel.units import format_bytes

TASTES = (
    HeuristicWeights("never", by_time=False, stall=1.0),
    HeuristicWeights("also", by_time=False, stall=1.0),
    HeuristicWeights("also", by_time=False, stall=3.0),
    HeuristicWeights("also", by_time=True, stall=3.0),
    HeuristicWeights("first", by_time=True, stall=1.0),
)
QUICK = TASTES[1]
"""The one that is nearest to the best of all most often."""
CHOICES = 1500
"""Gaps chosen, by all tastes together, after which no other taste is tried."""
FEW = 100
"""Gaps in a plan up to which stores are tried as well that begin only when their storage is idle."""
ROUNDS = 4
"""Times that places are found again with the times that came out."""
WORK = 100_000
"""Nodes and moves that are looked at to improve a plan: many tries of a small one, a few of a large one."""
TRIES = 100
"""The most attempts to improve a plan, by default."""
HIDDEN = 1e-9
"""Of a step's seconds: less stall than this is none."""


def choose(problem: Problem, *, tries: int = TRIES, quick: bool = False, part: float = 1.0) -> Plan:
    """The quickest plan found that never holds more than `problem.budget` bytes.

    `tries`: the most attempts to improve it. `quick`: choose gaps by one setting of the heuristic only, for a search
    that compares many problems; it takes about a third of the time, and its plans are some percent slower. `part`: of
    a step that stands for one of more layers, the share of them that it has: so many fewer gaps are candidates. Raises
    BudgetError with the least budget where this planner has no plan within it.
    """
    base = np.array(problem.profile(), dtype=np.int64)
    peak, working_set = int(base.max(initial=0)), problem.working_set
    gaps = gaps_of(problem)
    floor = floor_of(problem, gaps, base)
    if problem.budget < floor.bytes:
        raise refusal(problem, floor.bytes)
    if not floor.chosen.holds:
        raise no_room(problem)
    if peak <= problem.budget and not problem.updates:
        return Plan((), peak, replay(problem, ()).seconds, 0.0, floor.bytes, working_set)
    best = _Planner(problem, gaps, base, 0 if quick else tries, quick, int(ROWS * part)).plan(floor.chosen)
    live = max(problem.profile(best.moves))
    assert live <= problem.budget
    return Plan(best.moves, live, best.replayed.seconds, best.replayed.stall, floor.bytes, working_set)


@dataclass(frozen=True)
class _Found:
    """A plan that meets the budget."""

    layout: Layout
    moves: tuple[Move, ...]
    replayed: Replayed

    @property
    def rank(self) -> tuple[float, int]:
        """Lower is better: quicker, then less to move."""
        rows = self.layout.rows
        return self.replayed.seconds, int(self.layout.gaps.bytes[rows].sum())


class _Planner:
    def __init__(self, problem: Problem, gaps: Gaps, base: Ints, tries: int, quick: bool, rows: int) -> None:
        self._problem, self._gaps, self._base, self._tries = problem, gaps, base, tries
        self._quick, self._rows = quick, rows
        self._idle = replace(gaps, open=gaps.after)
        """As if no store could begin before its storage is idle."""
        self._hidden = HIDDEN * problem.seconds

    def plan(self, frugal: Chosen) -> _Found:
        """The best plan found; `frugal` is one that meets every budget that can be met."""
        plans: list[_Found] = []
        for found in self._candidates():
            plans.append(found)
            if found.replayed.stall <= self._hidden:
                return found
        if not plans:
            # No space has room for what was chosen. This one fits; it is only slow.
            layout = farthest(self._gaps, self._base, self._problem.budget, frugal)
            assert layout.fits()
            plans.append(self._replayed(layout))
            plans += self._refined(frugal.copy(), Times.replayed(plans[0].replayed))
        best = min(plans, key=lambda one: one.rank)
        if best.replayed.stall <= self._hidden:
            return best
        return self._improved(best)

    def _improved(self, best: _Found) -> _Found:
        """Give a few gaps up, perhaps of those waited for, or take more, mend what that breaks, keep what is better."""
        draw = random.Random(0)
        moved = best.layout.rows.size
        storage, gap = self._gaps.storage.tolist(), self._gaps.gap.tolist()
        for _ in range(min(self._tries, WORK // (self._gaps.nodes + 8 * moved))):
            if best.replayed.stall <= self._hidden:
                break
            chosen = best.layout.chosen.copy()
            rows = best.layout.rows[~self._gaps.must[best.layout.rows]].tolist()
            others = np.flatnonzero(~chosen.flags).tolist()
            late = [row for row in rows if (storage[row], gap[row]) in best.replayed.waits]
            given = late if late and draw.random() < 0.5 else rows
            for row in draw.sample(given, min(len(given), draw.randint(0, 3))):
                chosen.drop(row)
            for row in draw.sample(others, min(len(others), draw.randint(0, 2))):
                chosen.add(row)
            gaps = draw.choice((self._gaps, self._idle)) if moved <= FEW else self._gaps
            for found in self._refined(chosen, Times.replayed(best.replayed), 2, gaps):
                best = min(best, found, key=lambda one: one.rank)
        return best

    def _candidates(self) -> Iterator[_Found]:
        choices = 0
        if self._quick:
            covered = Cover(self._problem, self._gaps, self._problem.budget, self._rows).choose(
                QUICK, Chosen(self._problem, self._gaps)
            )
            times = Times.stalled(self._problem, covered.stalls)
            for gaps in (self._gaps, self._idle):
                yield from self._refined(covered.chosen, times, ROUNDS - 1, gaps)
            return
        for gaps, most in ((self._gaps, CHOICES), (self._idle, FEW * len(TASTES))):
            cover = Cover(self._problem, gaps, self._problem.budget, self._rows)
            for taste in TASTES:
                if choices > most:
                    return
                covered = cover.choose(taste, Chosen(self._problem, self._gaps))
                choices += int(covered.chosen.flags.sum())
                times = Times.stalled(self._problem, covered.stalls)
                yield from self._refined(covered.chosen, times, gaps=gaps)

    def _refined(
        self, chosen: Chosen, times: Times, rounds: int = ROUNDS, gaps: Gaps | None = None
    ) -> Iterator[_Found]:
        """Places for gaps, found again and again while the step becomes quicker."""
        gaps = gaps or self._gaps
        least = np.inf
        for _ in range(rounds):
            layout, stored = guess(gaps, self._base, self._problem.budget, chosen.copy(), times)
            if not repair(layout, times, stored):
                return
            edf_schedule(self._problem, layout)
            dropped = prune(layout)
            advance(layout, times)
            delay(layout, times, stored)
            found = self._replayed(layout)
            yield found
            if found.replayed.seconds >= least and not dropped:
                return
            least = min(least, found.replayed.seconds)
            chosen, times = layout.chosen, Times.replayed(found.replayed)

    def _replayed(self, layout: Layout) -> _Found:
        moves = layout.moves(self._problem)
        return _Found(layout, moves, replay(self._problem, moves))


# Minimum feasible budget, and the message for a smaller one.
#
# Where the spaces have room for everything, all that is not in use at a node may be away there, so that the floor is
# the working set. Otherwise it is the least budget, found by bisection, at which a sweep over the nodes finds room for
# what must be away: at the first node that exceeds, the gap with the farthest next use goes (Belady 1966), if there is
# room.

STEPS = 16
"""Of the bisection: to within a 65,536th of what lies between the working set and the peak."""
SHOWN = 5
"""Storages that a message names."""


@dataclass(frozen=True)
class Floor:
    """The least budget that this planner can meet."""

    bytes: int
    chosen: Chosen
    """Gaps that meet it, when each is away as long as it can be."""


def floor_of(problem: Problem, gaps: Gaps, base: Ints) -> Floor:
    """The floor; the budget of the problem does not matter."""
    everything = Chosen(problem, gaps)
    order = np.lexsort((np.arange(len(gaps)), -gaps.bytes)).tolist()
    if problem.spaces and all(everything.add(row) for row in order):
        return Floor(problem.working_set, everything)
    least, most = problem.working_set, int(base.max(initial=0))
    best = Floor(most, Chosen(problem, gaps))
    for _ in range(STEPS):
        if least >= most or not problem.spaces:
            break
        middle = (least + most) // 2
        found = _sweep(problem, gaps, base, middle)
        if found is None:
            least = middle + 1
        else:
            most = found.live.peak
            best = Floor(most, found.chosen)
    return best


def farthest(gaps: Gaps, base: Ints, budget: int, chosen: Chosen) -> Layout:
    """Every chosen gap away for as long as it can be."""
    return Layout(gaps, base, budget, chosen, gaps.after.copy(), gaps.used.copy())


def _sweep(problem: Problem, gaps: Gaps, base: Ints, budget: int) -> Layout | None:
    layout = farthest(gaps, base, budget, Chosen(problem, gaps))
    n, node = gaps.nodes, 0
    open_ = ~gaps.must
    while True:
        node = layout.live.first_over(node, n, budget)
        if node >= n:
            return layout
        near = gaps.near(node)
        at = np.where(gaps.after[near] <= node, node, node + n)
        inside = np.flatnonzero(open_[near] & (gaps.after[near] <= at) & (at < gaps.used[near]))
        rows, at = near[inside], at[inside]
        order = np.lexsort((rows, -gaps.bytes[rows], at - gaps.used[rows]))
        for row in rows[order].tolist():
            open_[row] = False
            layout.join(row, int(gaps.after[row]), int(gaps.used[row]))
            if layout.live.at[node] <= budget:
                break
        else:
            return None


def refusal(problem: Problem, floor: int) -> BudgetError:
    """Why a budget cannot be met, and what would do."""
    needed = problem.needed()
    working_set = max(needed, default=0)
    lines = [
        f"the budget of {format_bytes(problem.budget)} is too small for this step: at least {floor:,} bytes "
        f"({format_bytes(floor)}) are needed",
        f"{format_bytes(working_set)} are in use at once, below which no plan comes: "
        f"{', '.join(_in_use(problem, needed.index(working_set), working_set))}",
    ]
    if floor > working_set:
        lines.append(
            f"{format_bytes(floor - working_set)} more stay on the device because other memory has no room for them "
            f"({_rooms(problem)}), and with that much more of it the least would do"
        )
    why = "; ".join(lines)
    lines.append(
        f"set memory.device to {format_bytes(floor)} or more, or make the step smaller, for example by "
        "train.micro_batch or train.loss.chunk"
    )
    return BudgetError("; ".join(lines), why, floor)


def no_room(problem: Problem) -> BudgetError:
    """Why the updates of a problem cannot run on the host."""
    count = len(problem.updates)
    return BudgetError(
        f"the updates of {count} parameter{'s' if count > 1 else ''} are to run on the host, and beside their state "
        f"other memory has too little room for parameters and gradients ({_rooms(problem)}); set memory.host higher, "
        "or memory.update to auto or device"
    )


def _rooms(problem: Problem) -> str:
    return ", ".join(f"{space.name} {format_bytes(space.bytes)}" for space in problem.spaces) or "none"


def _in_use(problem: Problem, node: int, working_set: int) -> list[str]:
    """What is there at a node whatever the plan, the largest first."""
    there = [
        held for held in problem.held if any(first <= node < end for first, end in held.pinned(problem.nodes))
    ]
    there.sort(key=lambda held: (-held.bytes, held.storage))
    shown = [held for held in there[:SHOWN] if held.bytes >= working_set / 100]
    listed = [f"{held.name or 'a tensor'} ({held.kind}, {format_bytes(held.bytes)})" for held in shown]
    others = there[len(shown) :]
    if others:
        listed.append(f"{len(others)} more ({format_bytes(sum(held.bytes for held in others))})")
    workspace = sum(taken.bytes for taken in problem.taken if taken.first <= node <= taken.last)
    if workspace:
        listed.append(f"workspaces ({format_bytes(workspace)})")
    return listed
