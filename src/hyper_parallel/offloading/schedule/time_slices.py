"""Time slices of a step, cut where the lower bound needs memory constraints.

Slice u lies between the boundaries u and u + 1, and the last one ends where the next step's first begins. A boundary
is the begin of a chosen place's node. Where such a node is long, its end is one too, so that the node is a slice of its
own, in which nothing waits: no store that ends in it is in time for it, and no fetch of what is away begins in it.
Places, boundaries and slices of the next step are counted on from those of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Flags, Floats, Ints
from hyper_parallel.offloading.schedule.problem import Problem

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
