"""Greedy selection of idle intervals against the remaining link time.

Time is cut into slices k of about equal seconds. With the bytes E(k) by which slice k exceeds the budget, and the
seconds that each link has left in each slice, a gap is worth

    Σ min(bytes, E⁺(k)) · weight(k) over the slices at which it would be away
    ─────────────────────────────────────────────────────────────────────────
    seconds of its copies + `stall` · seconds that the step would have to wait

and the gap that is worth most is chosen, until nothing exceeds. It is away from when the link out has had time for its
copy, which it has from when what is copied is final, until the link back must begin. Links are fluids here: which of
the copies are under way at a time does not matter for how many bytes have left by then, as long as the link is not
idle, so that a link's seconds may be given out in any order. Of slice k the stall before it is slice 2k of a link and
its run 2k + 1; a stall that one gap needs is time that both directions of every link have.

This is weighted set cover's greedy rule (Chvátal 1979) with prices of two machines. What it chooses is placed exactly,
and its stalls found anew, by `placement`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Chosen, Floats, Gaps, Ints, LiveProfile
from hyper_parallel.offloading.schedule.problem import Problem

SLICES = 900
"""The most time slices that a step is cut into."""
ROWS = 2500
"""The number of gaps, the largest ones, that are candidates; smaller ones are left to the repair."""
SHORT = 96
"""Candidates that are weighed again at each choice."""
REFRESH = 16
"""Choices after which all candidates are weighed again."""
STEPS = 4
"""The one before, for what is final since then, the step itself, the next one, and a bit."""
_TINY = 1e-12


@dataclass(frozen=True)
class HeuristicWeights:
    """How candidates are compared. No taste is best for all problems; several are tried."""

    hidden: Literal["first", "also", "never"]
    """Gaps whose copies hide: before all others, beside them, or without asking whether they hide."""
    by_time: bool
    """Slices weigh as their seconds, not one each."""
    stall: float
    """Seconds of copies that a second of stall is as bad as."""


@dataclass(frozen=True)
class Covered:
    """Gaps that bring every slice under the budget, as far as they can."""

    chosen: Chosen
    stalls: Floats
    """Of each node, seconds that it waits."""


@dataclass(frozen=True)
class _Ways:
    """For each candidate (`rows`), where it would be away, what that covers, and the stalls before and behind."""

    rows: Ints
    leave: Ints
    fetch: Ints
    before: Floats
    behind: Floats
    worth: Floats
    hidden: bool
    """None of them stalls."""


_Links = list[tuple[int, Ints, Floats, Floats]]
"""Space, which of the candidates have their slot there, and the seconds that its two links have had since slice 0."""


class Cover:
    """Chooses gaps for one problem; the slices serve all tastes."""

    def __init__(self, problem: Problem, gaps: Gaps, budget: int, rows: int = ROWS) -> None:
        """`rows`: the most candidates."""
        starts = np.asarray(problem.starts)
        self._cuts = _cuts(starts)
        self._slices = m = self._cuts.size
        self._gaps = gaps
        self._over = (np.maximum.reduceat(np.array(problem.profile()), self._cuts) - budget).astype(float)
        self._seconds = np.diff(np.append(starts[self._cuts], starts[-1]))
        n, nodes = gaps.nodes, np.arange(gaps.nodes + 1)
        opens, shuts = np.searchsorted(self._cuts, nodes), np.searchsorted(self._cuts, nodes, "right") - 1
        shuts[n] = m
        first = opens[gaps.after % n] + m * (gaps.after // n)
        final = opens[gaps.open % n] + m * (gaps.open // n)
        last = shuts[gaps.used % n] + m * (gaps.used // n)
        large = np.argsort(-gaps.bytes, kind="stable")[:rows]
        self._rows = np.sort(large[first[large] < last[large]])
        self._final, self._first, self._last = final, first, last

    def choose(self, taste: HeuristicWeights, chosen: Chosen) -> Covered:
        """Choose gaps; `chosen` is empty, and changed."""
        return _Run(self, taste, chosen).go()

    @property
    def _weights(self) -> tuple[Floats, Floats]:
        return np.ones(self._slices), self._seconds


class _Run:
    """One greedy choice."""

    def __init__(self, cover: Cover, taste: HeuristicWeights, chosen: Chosen) -> None:
        self.taste, self.chosen, self.gaps = taste, chosen, cover._gaps
        self.cover, self.m = cover, cover._slices
        self.final, self.first, self.last = cover._final, cover._first, cover._last
        self.over = cover._over.copy()
        self.weight = cover._weights[int(taste.by_time)]
        spaces = len(self.gaps.out)
        self.free = np.zeros((2, spaces, 2 * self.m))
        """[out or back, space, slice]."""
        self.free[:, :, 1::2] = cover._seconds
        self.out = self.gaps.out.copy()
        """[space, gap]: 0 of those whose version is stored by another gap."""
        self.open = np.zeros(len(self.gaps), dtype=bool)
        self.open[cover._rows] = True
        self.stalls = np.zeros(self.m)
        self.turn = 0
        self.short: Ints = np.array([], dtype=np.int64)
        """Rows that were worth most when all were looked at, and what the best of the others was worth then."""
        self.others = 0.0
        self.was_hidden = False
        self.carriers: dict[int, tuple[int, int, Ints, Floats]] = {}
        """Of each stored version: the row that carries the store, its space, and the seconds that it took."""

    def go(self) -> Covered:
        # What has to be away takes its part of the links, and leaves what it can.
        must = np.flatnonzero(self.gaps.must)
        for row in must[np.lexsort((self.gaps.used[must], self.gaps.after[must]))].tolist():
            one = np.array([row])
            self._take(self._hidden(one, self._sums(), self._links(one)), 0)
        while (self.over > 0).any():
            best = self._next()
            if best is None:
                break
            self._take(*best)
        stalls = np.zeros(self.gaps.nodes)
        stalls[self.cover._cuts] = self.stalls
        return Covered(self.chosen, stalls)

    def _next(self) -> tuple[_Ways, int] | None:
        """What is worth most. What a gap is worth falls as others are chosen, so that an old worth is a bound."""
        self.turn += 1
        if self.turn % REFRESH and self.short.size:
            ways = self._best(self.short[self.open[self.short]])
            if ways is not None and ways.hidden == self.was_hidden:
                at = int(np.argmax(ways.worth))
                if ways.worth[at] > 0 and ways.worth[at] >= self.others:
                    return ways, at
        ways = self._best(np.flatnonzero(self.open))
        if ways is None:
            return None
        at = int(np.argmax(ways.worth))
        order = np.argsort(-ways.worth, kind="stable")
        self.short, self.was_hidden = np.sort(ways.rows[order[:SHORT]]), ways.hidden
        self.others = float(ways.worth[order[SHORT]]) if order.size > SHORT else 0.0
        return (ways, at) if ways.worth[at] > 0 else None

    def _best(self, rows: Ints) -> _Ways | None:
        if not rows.size:
            return None
        sums, links = self._sums(), self._links(rows)
        if self.taste.hidden == "never":
            return self._with_stalls(rows, sums, links)
        hidden = self._hidden(rows, sums, links)
        if self.taste.hidden == "first" and (hidden.worth > 0).any():
            return hidden
        waits = self._with_stalls(rows, sums, links)
        if self.taste.hidden == "first":
            return waits
        # Of each row the better way.
        better = hidden.worth >= waits.worth
        return _Ways(
            rows,
            np.where(better, hidden.leave, waits.leave),
            np.where(better, hidden.fetch, waits.fetch),
            np.where(better, 0.0, waits.before),
            np.where(better, 0.0, waits.behind),
            np.where(better, hidden.worth, waits.worth),
            False,
        )

    def _sums(self) -> tuple[Floats, Floats]:
        """Running sums over two steps: of the weight of slices that exceed, and of weight · bytes."""
        over = np.maximum(self.over, 0.0)
        return _running(self.weight * (over > 0)), _running(self.weight * over)

    def _worth(self, rows: Ints, leave: Ints, fetch: Ints, sums: tuple[Floats, Floats]) -> Floats:
        share = [part[fetch] - part[leave] for part in sums]
        found: Floats = np.where(leave < fetch, np.minimum(self.gaps.bytes[rows] * share[0], share[1]), 0.0)
        return found

    def _links(self, rows: Ints) -> _Links:
        """By space: which of the rows (positions in `rows`), and what each link has given since slice 0."""
        spaces = self.chosen.space[rows]
        found = []
        for space in range(len(self.gaps.out)):
            here = np.flatnonzero(spaces == space)
            if here.size:
                found.append((space, here, _running(self.free[0, space]), _running(self.free[1, space])))
        return found

    def _seconds(self, rows: Ints) -> tuple[Floats, Floats]:
        spaces = self.chosen.space[rows]
        return self.out[spaces, rows], self.gaps.back[spaces, rows]

    def _hidden(self, rows: Ints, sums: tuple[Floats, Floats], links: _Links) -> _Ways:
        """Away for as long as the links allow without a stall."""
        first, last = self.first[rows], self.last[rows]
        out, back = self._seconds(rows)
        leave, fetch = np.empty_like(first), np.empty_like(last)
        for _, here, gone, come in links:
            least = np.searchsorted(gone, gone[self._at(self.final[rows[here]])] + out[here] - _TINY)
            leave[here] = np.maximum(first[here], least // 2 - self.m)
            most = np.searchsorted(come, come[self._shut(last[here])] - back[here] + _TINY, "right") - 1
            fetch[here] = np.minimum(last[here], most // 2 - self.m)
        # What does not come back in time leaves no trace here: worth 0.
        leave, fetch = np.minimum(leave, 2 * self.m), np.maximum(fetch, 0)
        none = np.zeros(rows.size)
        worth = self._worth(rows, leave, fetch, sums) / (out + back)
        return _Ways(rows, leave, fetch, none, none, worth, True)

    def _with_stalls(self, rows: Ints, sums: tuple[Floats, Floats], links: _Links) -> _Ways:
        """Away at all slices of the gap that exceed, whatever that takes."""
        first, last = self.first[rows], self.last[rows]
        out, back = self._seconds(rows)
        over = np.flatnonzero(np.tile(self.over > 0, 2))
        at = np.searchsorted(over, first)
        to = np.searchsorted(over, last) - 1
        some = at <= to
        leave = np.where(some, over[np.minimum(at, over.size - 1)], first)
        fetch = np.where(some, over[np.maximum(to, 0)] + 1, first)
        before, behind = np.zeros(rows.size), np.zeros(rows.size)
        for _, here, gone, come in links:
            had = gone[self._shut(leave[here])] - gone[self._at(self.final[rows[here]])]
            before[here] = np.maximum(0.0, out[here] - had)
            had = come[self._shut(last[here])] - come[self._at(fetch[here])]
            behind[here] = np.maximum(0.0, back[here] - had)
        copies = 0.0 if self.taste.hidden == "first" else out + back
        worth = self._worth(rows, first, np.where(some, last, first), sums)
        worth = worth / (copies + self.taste.stall * (before + behind) + 1e-9)
        return _Ways(rows, leave, fetch, before, behind, worth, False)

    def _take(self, ways: _Ways, at: int) -> None:
        row, m = int(ways.rows[at]), self.m
        self.open[row] = False
        if not self._place(row):
            return
        space = int(self.chosen.space[row])
        leave, fetch, last = int(ways.leave[at]), int(ways.fetch[at]), self.last[row]
        for where, wait in ((leave, ways.before[at]), (int(last), ways.behind[at])):
            self.free[:, :, 2 * (where % m)] += wait
            self.stalls[where % m] += wait
        out = self.out[space, row]
        if out > 0:
            version = int(self.gaps.version[row])
            # As late as it can be, since what is final early can wait for what is not.
            taken = _take(self.free[0, space], 2 * leave + 1, out, backward=True)
            if version in self.carriers:
                # The store moves to the gap before; the one that carried it gives its seconds back.
                _, other, slices, seconds = self.carriers[version]
                self.free[0, other][slices] += seconds
            self.carriers[version] = (row, space, *taken)
            same = self.gaps.alike[version]
            self.out[:, same[self.gaps.turn[same] > self.gaps.turn[row]]] = 0.0
        _take(self.free[1, space], 2 * int(last) + 1, self.gaps.back[space, row], backward=True)
        if leave < fetch:
            LiveProfile(self.over).add(leave, fetch, -int(self.gaps.bytes[row]))

    def _at(self, place: Ints) -> Ints:
        """Index of a slice's stall in running sums of a link, which begin with the step before."""
        found: Ints = 2 * (place + self.m)
        return found

    def _shut(self, place: Ints) -> Ints:
        """Index behind the stall before a slice."""
        return self._at(place) + 1

    def _place(self, row: int) -> bool:
        """Choose a row where its space has room still; else it is a candidate for the next space, if any."""
        was = int(self.chosen.space[row])
        if not self.chosen.add(row):
            return False
        if int(self.chosen.space[row]) == was:
            return True
        if sum(bool(self.chosen.flags[one]) for one in self.gaps.rows[int(self.gaps.storage[row])]) > 1:
            # Its storage moved on as a whole; what the links have given it before stays given.
            return True
        self.chosen.drop(row)
        self.open[row] = True
        return False


def _cuts(starts: Floats) -> Ints:
    """First nodes of the slices."""
    n = starts.size - 1
    if n <= SLICES:
        return np.arange(n)
    least = (starts[-1] - starts[0]) / SLICES
    cuts, begin = [0], starts[0]
    for node, start in enumerate(starts[:-1].tolist()):
        if start - begin >= least:
            cuts.append(node)
            begin = start
    return np.array(cuts)


def _running(values: Floats) -> Floats:
    """Sums of the first 0, 1, … values of a few steps."""
    size = values.size
    found = np.empty(STEPS * size + 1)
    found[0] = 0.0
    np.cumsum(values, out=found[1 : size + 1])
    for step in range(1, STEPS):
        found[step * size + 1 : (step + 1) * size + 1] = found[1 : size + 1] + found[step * size]
    return found


def _take(free: Floats, at: int, seconds: float, backward: bool = False) -> tuple[Ints, Floats]:
    """Take seconds from the slices from `at` on, or before it; the slices and what each gave."""
    size = free.size
    order = (at - 1 - np.arange(size)) % size if backward else (at + np.arange(size)) % size
    had = np.cumsum(free[order])
    end = min(int(np.searchsorted(had, seconds - _TINY)), size - 1)
    order = order[: end + 1]
    given = free[order]
    given[end] = min(given[end], seconds - (had[end - 1] if end else 0.0))
    free[order] -= given
    return order, given
