"""LP relaxation for `lower_bound`: fractions of storages offloaded, and traffic on the links.

Variables, of each family of storages that are idle at the same places, in each space and each gap, as fractions:

    stored[t]     carried out in slice t of the gap, and gone with it
    early[t]      carried out in slice t since the last write, for a later gap: it may be there or in use meanwhile
    left          in the slot since before the gap, and gone as the gap begins
    fetched[t]    carried back in slice t

and the bytes away in each space at each place k. A store is in time for a place that ends before its node begins, and
what is fetched while a node runs was there as it began. So with stores and fetches counted at the place that they are
(no longer) in time for:

    Σ fetched = left + Σ stored,   left ≤ Σ stored and early since the last write (≤ 1 of what no step writes)
    left + Σ stored over all spaces ≤ 1
    away(k) = away(k − 1) + Σ bytes · (left and stored for place k − fetched before place k)
    bytes alive(k) − Σ away(k) ≤ budget,     away(k) ≤ the space's bytes
    Σ seconds · (stored[t] + early[t]) ≤ seconds of slice t + its stall                       of each space's link out
    Σ seconds · fetched[t] ≤ seconds of slice t + its stall                       of each space's link back

No row says that a fraction is stored before it is fetched: the other way round it would only take memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Floats, Ints
from hyper_parallel.offloading.schedule.linear_program import Linear
from hyper_parallel.offloading.schedule.live_profile import LiveProfile
from hyper_parallel.offloading.schedule.problem import Buffer, OffloadTier, Problem, Rate
from hyper_parallel.offloading.schedule.time_slices import cut

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
