"""Lower bound on step time under a budget, by a linear program that every plan satisfies.

Time is cut at chosen places c. Of each storage that is idle in a gap, the program may move any *fraction*:

    live bytes at c − Σ bytes · fraction away at c  ≤  budget
    Σ over a slice of time of the fractions a link carries · their seconds  ≤  the slice's seconds + its stall
    what is away was stored since it was last written, and is fetched before it is used     (`relaxation`, in full)

and the least budget is sought with every stall 0 (`zero_stall_budget`), or the least Σ stall under the budget
(`least_seconds`).

**Why it is a bound.** Take any plan whose step repeats, with any order of copies on a link that carries one at a time.
Let "stored" and "fetched" be the fractions of each copy that its link has carried by a time. A store begins behind the
last write before its gap, perhaps long before the gap, and is over where its storage leaves, so that all of it is
stored by each place at which the storage is away. A fetch begins when the host comes to its place, after the last node
at which the storage is away, and is over before the next use. A node never takes less time than `starts` gives it, so
that what lies between the ends of a slice is its base and the stalls in it. So the plan, as it is, meets every row, and
its time is base plus stalls. Everything else is left out, which only lowers the bound: that a whole storage comes and
goes, that memory must be met at places that are not chosen, that a link is first in first out, and where in a slice a
gap begins. The step that counts is the one that repeats: over many steps no link carries more than the time there is.

**Updates on the host.** The program leaves out that their gradients and parameters have to be away, and in which order
what concerns them goes: a gradient dies with its last use, and a parameter may come back at once. But each step has to
be as long as all their copies out, all their copies back, and the host's work, each one after the other.

**How it is made small.** Storages whose gaps hold the same places are one variable. They are alike but for latency, of
which each byte is charged what the largest of them pays. Small ones, together less than `SMALL` of the peak, are taken
to be away whenever they are idle, at no cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Flags, Floats, Ints, LiveProfile
from hyper_parallel.offloading.schedule.linear_program import Linear
from hyper_parallel.offloading.schedule.problem import Buffer, OffloadTier, Problem, Rate

PLACES = 128
"""Places at which memory is asked for, where a step has more nodes. More make the bound higher and slower."""


def zero_stall_budget(problem: Problem, *, places: int = PLACES, seconds: float = 60.0) -> int:
    """Bytes below which every plan makes the step wait for copies, whatever `problem.budget` is.

    `places`: how many places memory is asked for at. `seconds`: after how long the solver is asked for what it has.
    Raises SolverError without HiGHS (`pip install 'hyper-parallel[bounds]'`).
    """
    problem = _without_updates(problem)
    peak, least = max(problem.profile(), default=0), problem.working_set
    if least == peak or not problem.spaces:
        return peak
    relaxation = Relaxation(problem, least, places, stalls=False)
    # Beyond the working set, as a share of the peak.
    more = relaxation.linear.new(1, 1 - least / peak, cost=1.0)
    relaxation.linear.add(relaxation.memory, more, 1.0)
    return least + max(0, math.ceil(relaxation.linear.least(seconds) * peak))


def least_seconds(problem: Problem, *, places: int = PLACES, seconds: float = 60.0) -> float:
    """Seconds of a step that no plan within `problem.budget` goes below; infinity where there is no such plan.

    `places`, `seconds` and what is raised are as of `zero_stall_budget`.
    """
    host = _of_updates(problem)
    problem = _without_updates(problem)
    if max(problem.profile(), default=0) <= problem.budget:
        return max(problem.seconds, host)
    if problem.budget < problem.working_set or not problem.spaces:
        return math.inf
    relaxation = Relaxation(problem, problem.budget, places, stalls=True)
    return max(host, problem.seconds + max(0.0, relaxation.linear.least(seconds)) * relaxation.unit)


def _without_updates(problem: Problem) -> Problem:
    held = tuple(replace(one, must=None) if one.must is not None else one for one in problem.held)
    return replace(problem, held=held, updates=())


def _of_updates(problem: Problem) -> float:
    """Seconds of a step below which its updates on the host do not go."""
    spaces = {space.name: space for space in problem.spaces}
    out = back = host = 0.0
    for update in problem.updates:
        gradient, parameter = (problem.by_storage[one] for one in (update.gradient, update.parameter))
        assert gradient.must is not None
        space = spaces[gradient.must.space]
        out += space.out.seconds(gradient.bytes)
        back += space.back.seconds(parameter.bytes)
        host += update.seconds
    return max(out, back, host)


# LP relaxation for `lower_bound`: fractions of storages offloaded, and traffic on the links.
#
# Variables, of each family of storages that are idle at the same places, in each space and each gap, as fractions:
#
#     stored[t]     carried out in slice t of the gap, and gone with it
#     early[t]      carried out in slice t since the last write, for a later gap: it may be there or in use meanwhile
#     left          in the slot since before the gap, and gone as the gap begins
#     fetched[t]    carried back in slice t
#
# and the bytes away in each space at each place k. A store is in time for a place that ends before its node begins, and
# what is fetched while a node runs was there as it began. So with stores and fetches counted at the place that they are
# (no longer) in time for:
#
#     Σ fetched = left + Σ stored,   left ≤ Σ stored and early since the last write (≤ 1 of what no step writes)
#     left + Σ stored over all spaces ≤ 1
#     away(k) = away(k − 1) + Σ bytes · (left and stored for place k − fetched before place k)
#     bytes alive(k) − Σ away(k) ≤ budget,     away(k) ≤ the space's bytes
#     Σ seconds · (stored[t] + early[t]) ≤ seconds of slice t + its stall                       of each space's link out
#     Σ seconds · fetched[t] ≤ seconds of slice t + its stall                       of each space's link back
#
# No row says that a fraction is stored before it is fetched: the other way round it would only take memory.

SMALL = 1e-4
"""Storages that together are less than this share of the peak are away whenever they are idle, at no cost."""


@dataclass(frozen=True)
class Span:
    """When a storage may move, from a write of it to the next one."""

    places: tuple[tuple[int, int], ...]
    """First and last chosen place of each gap that holds any."""
    early: tuple[int, ...]
    """Slices in which it may be stored for a later gap: from when it is final to when its last gap begins."""
    written: bool
    """Else no step ever writes it, and a slot has it from the beginning."""


@dataclass
class Family:
    """Storages of one span."""

    bytes: int = 0
    largest: int = 0
    """Bytes of the largest one, which pays least latency for a byte."""

    def seconds(self, rate: Rate) -> float:
        """Of a link's time: no more than the copies of all members take."""
        return self.bytes / rate.bandwidth + rate.latency * self.bytes / self.largest


class Relaxation:
    """The program, to which the caller adds what is sought."""

    def __init__(self, problem: Problem, budget: int, places: int, stalls: bool) -> None:
        profile = problem.profile()
        self.linear = Linear()
        self.peak = max(profile)
        self.unit = problem.starts[-1] or 1.0
        """Seconds of 1 in the program."""
        self._nodes = problem.nodes
        self._slices = cut(problem, profile, places)
        self._families: dict[Span, Family] = defaultdict(Family)
        alive = np.asarray(profile, dtype=float)[self._slices.places[: self._slices.here]]
        alive -= self._collect(problem)
        self.memory = self.linear.where((alive - budget) / self.peak, np.inf)
        """A row for each place: at least this share of the peak is away."""
        base = self._slices.seconds / self.unit
        rates = [rate for space in problem.spaces for rate in (space.out, space.back)]
        self._links = [self.linear.where(-np.inf, base) for _ in rates]
        if stalls:
            free = np.flatnonzero(~self._slices.fixed)
            # All copies in a row are never too few.
            most = sum(
                family.seconds(rate) * len(span.places)
                for span, family in self._families.items()
                for rate in rates
            )
            waits = self.linear.new(free.size, most / self.unit, cost=1.0)
            for rows in self._links:
                self.linear.add(rows[free], waits, -1.0)
        away = [self._space(space) for space in problem.spaces]
        for span, family in self._families.items():
            whole = self.linear.where(-np.inf, np.ones(len(span.places)))
            for at, space in enumerate(problem.spaces):
                out, back = self._links[2 * at : 2 * at + 2]
                self._move(span, family, space, out, back, away[at], whole)

    def _space(self, space: OffloadTier) -> Ints:
        """Rows that say what is away in a space: at the first place in all, at each other one since the one before."""
        count = self._slices.here
        away = self.linear.new(count, min(1.0, space.bytes / self.peak))
        rows = self.linear.where(np.zeros(count), 0.0)
        self.linear.add(rows, away, -1.0)
        self.linear.add(rows[1:], away[:-1], 1.0)
        self.linear.add(self.memory, away, 1.0)
        return rows

    def _move(
        self, span: Span, family: Family, space: OffloadTier, out: Ints, back: Ints, away: Ints, whole: Ints
    ) -> None:
        """What a family's members do in a space."""
        linear, slices = self.linear, self._slices
        share = family.bytes / self.peak
        out_seconds, back_seconds = (family.seconds(rate) / self.unit for rate in (space.out, space.back))
        early = np.asarray(span.early, dtype=np.int64)
        stored_early = linear.new(early.size)
        linear.add(out[early % slices.count], stored_early, out_seconds)
        before: list[Ints] = []
        for at, (first, last) in enumerate(span.places):
            balance = linear.where(0.0, 0.0)
            fetches, since = slices.fetches(first, last)
            fetched = linear.new(fetches.size)
            linear.add(back[fetches % slices.count], fetched, back_seconds)
            linear.add(balance, fetched, -1.0)
            self._count(away, first, last, fetched, since, -share)
            if span.written:
                stores, since = slices.stores(first, last)
                stored = linear.new(stores.size)
                linear.add(out[stores % slices.count], stored, out_seconds)
                linear.add(balance, stored, 1.0)
                linear.add(whole[at], stored, 1.0)
                self._count(away, first, last, stored, since, share)
                earlier = np.concatenate([*before, stored_early[early < slices.boundary(first)]])
                before.append(stored)
                if not earlier.size:
                    continue
            left = linear.new(1)
            linear.add(balance, left, 1.0)
            linear.add(whole[at], left, 1.0)
            self._count(away, first, last, left, np.array([first]), share)
            if span.written:
                known = linear.where(-np.inf, 0.0)
                linear.add(known, left, 1.0)
                linear.add(known, earlier, -1.0)

    def _count(self, away: Ints, first: int, last: int, variables: Ints, since: Ints, share: float) -> None:
        """Count in what is away what changes with each of the places `since`, in a gap of the places given."""
        here = self._slices.here
        places = since % here
        later = places > 0
        self.linear.add(away[places[later]], variables[later], share)
        # The first place is counted in all: what has changed by then in a gap that holds it.
        for place in (0, here):
            if first <= place <= last:
                gone = variables[since <= place]
                self.linear.add(np.repeat(away[0], gone.size), gone, share)

    def _collect(self, problem: Problem) -> Floats:
        """Sort the storages into families; gives the bytes at each place that are away for nothing."""
        movable = sorted((held for held in problem.held if held.movable), key=lambda held: held.bytes)
        freed = LiveProfile(np.zeros(self._slices.here))
        left = SMALL * self.peak
        for held in movable:
            left -= held.bytes
            for span in self._spans(held):
                if left >= 0:
                    for first, last in span.places:
                        freed.add(first, last + 1, held.bytes)
                    continue
                family = self._families[span]
                family.bytes += held.bytes
                family.largest = max(family.largest, held.bytes)
        return freed.at

    def _spans(self, held: Buffer) -> Iterator[Span]:
        """A span from each write to the next; what is born counts as written, and state goes on in the next step."""
        slices, n = self._slices, self._nodes
        gaps = held.gaps(n)
        writes = [
            at
            for at, busy in enumerate(held.busy[: len(gaps)])
            if busy.writes or (at == 0 and not held.state)
        ]
        if held.state and writes:
            # From the first write on, around.
            gaps = gaps[writes[0] :] + [(first + n, last + n) for first, last in gaps[: writes[0]]]
            writes = [at - writes[0] for at in writes]
        for begin, end in zip(writes or [0], [*writes[1:], len(gaps)], strict=True):
            places: list[tuple[int, int]] = []
            for gap in gaps[begin:end]:
                found = slices.within(*gap)
                if found:
                    places.append((found.start, found.stop - 1))
            if places:
                # Of no use in the last slice before the last gap and behind it: there it is `stored`.
                final = slices.boundary(slices.within(*gaps[begin]).start) - 1
                early = tuple(range(final, slices.boundary(places[-1][0]) - 1)) if writes else ()
                yield Span(tuple(places), early, bool(writes))


# Time slices of a step, cut where the lower bound needs memory constraints.
#
# Slice u lies between the boundaries u and u + 1, and the last one ends where the next step's first begins. A boundary
# is the begin of a chosen place's node. Where such a node is long, its end is one too, so that the node is a slice of
# its own, in which nothing waits: no store that ends in it is in time for it, and no fetch of what is away begins in
# it. Places, boundaries and slices of the next step are counted on from those of this one.

LONG = 0.1
"""A node is long that takes this share of the mean slice."""


@dataclass(frozen=True)
class Slices:
    """Chosen places and the slices of time between them."""

    places: Ints
    """Ascending nodes, those of the next step behind them."""
    starts: Ints
    """Of each place, the boundary at which its node begins; also of the next step."""
    ends: Ints
    """The one at which its node ends; `starts` again of a short node, which belongs to the slice behind it."""
    seconds: Floats
    """Of each slice of one step, when nothing waits."""
    fixed: Flags
    """Of each slice, whether nothing can wait in it."""

    @property
    def count(self) -> int:
        """Slices of a step."""
        return self.seconds.size

    @property
    def here(self) -> int:
        """Places of a step."""
        return self.places.size // 2

    def boundary(self, place: int) -> int:
        """Where a place's node begins; behind the last place, the boundary that comes next."""
        return int(self.starts[place]) if place < self.starts.size else 2 * self.count

    def within(self, first: int, last: int) -> range:
        """Indices of the places from node `first` on and before node `last`; nodes of the next step from n on."""
        return range(int(np.searchsorted(self.places, first)), int(np.searchsorted(self.places, last)))

    def stores(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Slices in which a store may be carried in a gap of these places, and the place that each is in time for."""
        slices = np.arange(self.boundary(first) - 1, self.boundary(last))
        # In time is what ends where a place's node begins.
        return slices, np.searchsorted(self.starts, slices + 1)

    def fetches(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Slices in which what is away at the first place may be fetched, and the place from which on it is there."""
        slices = np.arange(int(self.ends[first]), self.boundary(last + 1))
        # What is carried while a place's node runs was there as it began.
        return slices, np.searchsorted(self.ends, slices, side="right")


def cut(problem: Problem, profile: Sequence[int], count: int) -> Slices:
    """Slices between at most `count` places: of each of half as many stretches the node with most bytes, and with most
    bytes that may not be away."""
    n, begins = problem.nodes, np.asarray(problem.starts)
    chosen = np.arange(n)
    if n > count:
        total = begins[-1] - begins[0]
        # Nodes without a time have a turn too, by their number.
        turn = ((begins[:-1] - begins[0]) / (total or 1.0) + np.arange(n) / n) / 2
        stretch = (turn * max(1, count // 2)).astype(int)
        ends = np.flatnonzero(np.diff(stretch, append=-1))
        # In the order of (stretch, bytes) the last of each stretch.
        chosen = np.union1d(*(np.lexsort((of, stretch))[ends] for of in (profile, problem.needed())))
    took = np.diff(begins)[chosen]
    long = took > LONG * (begins[-1] - begins[0]) / chosen.size
    starts = np.arange(chosen.size) + np.cumsum(long) - long
    ends = starts + long
    bounds = chosen.size + int(long.sum())
    times = np.empty(bounds + 1)
    times[starts] = begins[chosen]
    times[ends[long]] = begins[chosen + 1][long]
    times[-1] = begins[-1] + times[0] - begins[0]
    fixed = np.zeros(bounds, dtype=bool)
    fixed[starts[long]] = True
    return Slices(
        np.concatenate([chosen, chosen + n]),
        np.concatenate([starts, starts + bounds]),
        np.concatenate([ends, ends + bounds]),
        np.diff(times),
        fixed,
    )
