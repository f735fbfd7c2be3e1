"""Local search on small plans: single changes, each judged by simulating the step.

`placement` finds places from times, and cannot see what another order of a few copies would bring where nodes wait for
most of them. Here a change is drawn (a move begins, leaves or comes back elsewhere, a gap is given up or taken), mended
where it breaks the budget, and the step is run. From a step that is slower by d seconds it is gone on with the
probability

    exp(−d / warmth),   warmth = WARMTH · seconds of the best step · (share of the work that is left)²

(simulated annealing: Kirkpatrick, Gelatt and Vecchi, Science 220, 1983). Mending is greedy and drawn too: of what could
be away for longer, or as well, the least of

    u · (seconds it may cost) / (bytes that are asked for of it),   u even in [0, 1)

goes, so that one large move can give way to several small ones at once. No one plan is the best to begin with: several
are changed, the better half of them goes on, with twice the work each, until one is left (successive halving: Karnin,
Koren and Somekh, ICML 2013).

The draws are the same every time, and work is counted, in events of the step that are looked at, and not timed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from hyper_parallel.offloading.schedule.idle_intervals import Gaps
from hyper_parallel.offloading.schedule.problem import Problem, Replayed, replay
from hyper_parallel.offloading.schedule.transfer_layout import Draft, Facts, Layout

WARMTH = 0.005
CHANGES = (1, 1, 2, 3)
"""Made before the step is run again."""
SHIFTS = (1, 1, 2, 3, 5, 12)
"""Places that a move's begin, leave or fetch is shifted by."""
OTHER = 0.1
"""Share of the changes that give a gap up, or take one."""
LATE = 0.2
"""Share of the others that are of a move that is waited for."""
GIVEN = 0.3
"""Share of those that give it up."""
RELAXED = 0.1
"""Share of the changed plans in which then each move stays for as long as it can."""
DRAWS = 20
"""Gaps that are drawn, at most, to find one that is chosen."""
MENDS = 24
"""Absences that are made longer, or taken, to mend a change, at most."""
TRAFFIC = 0.1
"""Of the seconds of copies that hide in a gap: what taking it may cost. Other copies may have to wait for them."""
LEAST = 0.001
"""Of the step's seconds: what anything may cost at least."""
EACH = 400
"""Events that changing and mending count as."""

_Item = TypeVar("_Item")


def polish(
    problem: Problem, gaps: Gaps, layouts: Sequence[Layout], work: int, enough: float = 0.0
) -> tuple[Layout, Replayed]:
    """Improve layouts by simulated annealing; the quickest one found within the budget, perhaps one of `layouts`.

    `layouts`: at least one; all meet the budget, and none is changed. `work`: events of simulated steps to spend.
    `enough`: seconds of stall at which the search stops.
    """
    search = _Search(problem, gaps, enough)
    drafts = [Draft(search.facts, layout) for layout in layouts]
    found = [(layout, replay(problem, layout.moves(problem))) for layout in layouts]
    best = min(found, key=lambda one: one[1].seconds)
    rounds = len(layouts).bit_length() if len(gaps) else 0
    for _ in range(rounds):
        share = work // (rounds * len(drafts))
        ends: list[tuple[float, int, Draft]] = []
        for draft in drafts:
            if best[1].stall <= enough:
                return best
            end = search.anneal(draft, share)
            layout = end.layout(layouts[0])
            replayed = replay(problem, layout.moves(problem))
            ends.append((replayed.seconds, len(ends), end))
            best = min(best, (layout, replayed), key=lambda one: one[1].seconds)
        drafts = [end for *_, end in sorted(ends)[: max(1, len(ends) // 2)]]
    return best


class _Search:
    """What is the same for all plans of a problem, and the draws."""

    def __init__(self, problem: Problem, gaps: Gaps, enough: float) -> None:
        self.facts = facts = Facts(problem, gaps)
        self._enough = enough
        self._draw = random.Random(0)
        # Large storages more often: of the small ones little depends on any.
        self._weights = list(accumulate(math.sqrt(count) for count in facts.bytes))
        self._least = LEAST * facts.step
        copies = (gaps.out + gaps.back).min(axis=0, initial=math.inf).tolist()
        self._costs = [
            TRAFFIC * taken + max(0.0, taken - (facts.seconds[used] - facts.seconds[after]))
            for taken, after, used in zip(copies, facts.after, facts.used, strict=True)
        ]
        """Seconds that taking each gap may cost."""

    def anneal(self, start: Draft, work: int) -> Draft:
        """The best one found from another."""
        draw = self._draw
        best, least = start, start.stall()[0]
        here, now = best, least
        done = 0
        while done < work and least > self._enough:
            there = here.copy()
            for _ in range(draw.choice(CHANGES)):
                self._change(there)
            done += EACH
            if not self._mend(there):
                continue
            if draw.random() < RELAXED:
                self._relax(there)
            warmth = WARMTH * (least + self.facts.step) * max(0.0, 1 - done / work) ** 2
            stall, looked = there.stall(now - warmth * math.log(1.0 - draw.random()))
            done += looked
            if stall < math.inf:
                here, now = there, stall
            if stall < least:
                best, least = there, stall
        return best

    def _change(self, draft: Draft) -> None:
        """Shift a place of one move, or give a gap up, or take one."""
        facts, draw = self.facts, self._draw
        if draw.random() < OTHER:
            row = self._any()
            if not draft.taken[row]:
                self._take(draft, row, self._between(facts.after[row], facts.until[row]))
            elif not facts.must[row]:
                draft.drop(row)
            return
        row = self._moved(draft)
        if draft.waits and draw.random() < LATE:
            late = self._one(draft.waits)
            if draft.taken[late]:
                row = late
                if not facts.must[row] and draw.random() < GIVEN:
                    draft.drop(row)
                    return
        if not draft.taken[row]:
            return
        by = self._one((-1, 1)) * self._one(SHIFTS)
        leave, fetch = draft.leave[row], draft.fetch[row]
        match int(draw.random() * 3):
            case 0:
                last = min(facts.until[row], fetch - 1)
                draft.leave_at(row, min(max(leave + by, facts.after[row]), last))
            case 1:
                first = max(facts.since[row], leave + 1)
                draft.fetch_at(row, min(max(fetch + by, first), facts.used[row]))
            case _:
                draft.store_at(row, min(max(draft.store[row] + by, facts.open[row]), leave))

    def _take(self, draft: Draft, row: int, place: int) -> None:
        """Choose a gap, in which it is away at a place at least; nothing changes where no space has room."""
        facts, draw = self.facts, self._draw
        after, used = facts.after[row], facts.used[row]
        leave = place if draw.random() < 0.5 else self._between(after, place)
        fetch = used if draw.random() < 0.5 else self._between(max(place + 1, facts.since[row]), used)
        store = facts.open[row] if draw.random() < 0.5 else after
        draft.join(row, min(store, leave), leave, fetch)

    def _mend(self, draft: Draft) -> bool:
        """Bring every node under the budget; False where that takes too much."""
        facts, live, budget, random = self.facts, draft.live, draft.budget, self._draw.random
        seconds, until, sizes = facts.seconds, facts.until, facts.bytes
        taken, leave, fetch = draft.taken, draft.leave, draft.fetch
        for _ in range(MENDS):
            node = live.first_over(0, facts.nodes, budget)
            if node == facts.nodes:
                return True
            need = int(live.at[node]) - budget
            least, row, place = math.inf, -1, 0
            for one, at in facts.around[node]:
                if not taken[one]:
                    if at > until[one]:
                        continue
                    cost = self._costs[one]
                elif at >= fetch[one]:
                    cost = seconds[at + 1] - seconds[fetch[one]]
                elif at < leave[one] and at <= until[one]:
                    cost = seconds[leave[one]] - seconds[at]
                else:
                    continue
                price = random() * (cost + self._least) / min(sizes[one], need)
                if price < least:
                    least, row, place = price, one, at
            if row < 0:
                return False
            if not taken[row]:
                self._take(draft, row, place)
            elif place < leave[row]:
                draft.leave_at(row, place)
            else:
                draft.fetch_at(row, place + 1)
        return live.peak <= budget

    def _relax(self, draft: Draft) -> None:
        """Let each move stay as long, and come back as soon, as memory allows, or not go at all."""
        facts = self.facts
        rows = draft.rows
        self._draw.shuffle(rows)
        for row in rows:
            leave, fetch = draft.leave[row], draft.fetch[row]
            place = draft.latest(row, fetch)
            if place == fetch and not facts.must[row]:
                draft.drop(row)
                continue
            place = min(place, facts.until[row], fetch - 1)
            if place > leave:
                draft.leave_at(row, place)
            place = draft.earliest(row, max(facts.since[row], draft.leave[row] + 1))
            if place < fetch:
                draft.fetch_at(row, place)

    def _any(self) -> int:
        """A gap."""
        return bisect_right(self._weights, self._draw.random() * self._weights[-1])

    def _moved(self, draft: Draft) -> int:
        """One that is chosen, if one is drawn soon."""
        for _ in range(DRAWS):
            row = self._any()
            if draft.taken[row]:
                break
        return row

    def _one(self, items: Sequence[_Item]) -> _Item:
        """Any of them."""
        return items[int(self._draw.random() * len(items))]

    def _between(self, first: int, last: int) -> int:
        """A place from one to another, which both count."""
        return first + int(self._draw.random() * (last - first + 1))
