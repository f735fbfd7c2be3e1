"""What is kept, computed again or moved to the host: the best way for strategies that lack only this.

A group is a strategy with degrees, micro-batch, splits, order and schedule. Its ways are: compute nothing again,
attention's core, or k layers of a stage, times shares of the optimizer's state and of the activations on the host. More
of any of them takes less memory and, by itself, no less time. So for the fastest way (`Kept.fastest`)

* where keeping everything on the device fits, that is it;
* k can be no more than what is faster than a limit, and where so much, with all that may lie on the host, does not fit,
  the group is left out;
* of shares with which nothing need be computed again, only the least matter, since more are no faster;
* with other shares the fastest k is the least that fits, found by bisection.

Two terms are not of that kind. Where copies to the host are what a step waits for, a longer pass costs nothing and
hides more of the gradients' reduction: seconds fall first and rise later in k, so that the search goes on from the
least k for as long as that helps. Where stages are cut by cost, longer layers may be cut more evenly: all k from the
least on are tried.

The least memory is with as much on the host as fits there, and none, the core, or all layers computed again:
activations fall with k, and what a recomputed layer needs at once does not depend on it (`Kept.smallest`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.plan.bounds import by_cost
from hyper_parallel.plan.constants import Constants
from hyper_parallel.plan.model.memory import HOST_PART, fits, memory, within
from hyper_parallel.plan.model.step import seconds_by_kind, sum_of
from hyper_parallel.plan.space import FULL, NONE, Array, Columns, Mask, Space, taken
from hyper_parallel.plan.table import SPREAD, Table

Index = npt.NDArray[np.intp]
COLUMNS = ("recompute", "recomputed", "state_on_host", "activations_on_host")
_LESS = 1 - 1e-8
"""A group whose best way takes no longer than its bound is done, rounding apart."""


class Ways:
    """The best way of each of some groups, as far as it is known; seconds are inf where none is."""

    def __init__(self, groups: Columns) -> None:
        n = groups["micro"].size
        self.groups = groups
        self.rows: Columns = {**groups, **{name: np.zeros(n) for name in COLUMNS}}
        self.seconds: Array = np.full(n, np.inf)
        self.bytes: Array = np.full(n, np.inf)
        self.weighed = 0
        """Ways whose time was forecast."""

    def put(self, at: Index, ways: Columns, seconds: Array, bytes: Array, better: Mask) -> None:
        """Replace the ways of the groups `at` where they are `better`."""
        self.weighed += at.size
        for name in COLUMNS:
            self.rows[name][at[better]] = ways[name][better]
        self.seconds[at[better]], self.bytes[at[better]] = seconds[better], bytes[better]


class Kept:
    """Finds the best way of groups of one space."""

    def __init__(self, space: Space, base: Table, constants: Constants, bounded: bool = True) -> None:
        """`base`: what all rows have in common. `bounded`: by the device's memory."""
        self.space, self.base, self.constants, self.bounded = space, base, constants, bounded
        self.states, self.moved = (space.on_host[name] for name in COLUMNS[2:])

    def fastest(self, groups: Columns, bound: Array, limit: float) -> Ways:
        """The fastest way that fits, of groups that take at least `bound` seconds. [n]

        Of groups whose fastest takes `limit` seconds or more, some way or none.
        """
        best = Ways(groups)
        at = np.flatnonzero((bound < limit) & ~self._whole(best))
        most = self._affordable(taken(groups, at), limit) if at.size else np.zeros(0)
        held = self._possible(taken(groups, at), most) if at.size else np.zeros(0, dtype=np.bool_)
        at, most = at[held], most[held]
        if at.size:
            self._moved(best, at, most, bound, limit)
        return best

    def smallest(self, groups: Columns) -> Ways:
        """The way with the least memory; the fastest of those that have it."""
        best = Ways(groups)
        at = np.arange(best.seconds.size)
        pairs = [(state, moved) for state in self.states for moved in self.moved]
        for mode, share in self.space.again:
            # What fits the host decides how much may lie there.
            for state, moved in pairs:
                ways = self._ways(groups, mode, float(state), float(moved), 1.0 if share is None else share)
                bytes, fit = self._bytes(ways)
                seconds, _ = self._seconds(ways)
                least = (bytes < best.bytes) | ((bytes == best.bytes) & (seconds < best.seconds))
                best.put(at, ways, seconds, bytes, fit & least)
        return best

    def _whole(self, best: Ways) -> Mask:
        """Take in groups that fit as they are; of which of them no other way can be faster. [n]"""
        settled = np.zeros(best.seconds.size, dtype=np.bool_)
        if (NONE, 1.0) in self.space.again:
            ways = self._ways(best.groups, NONE, self.states[0], self.moved[0])
            bytes, fit = self._bytes(ways)
            at = np.flatnonzero(fit)
            settled[at] = ~self._take(best, at, taken(ways, at), bytes[at])
        return settled

    def _affordable(self, groups: Columns, limit: float) -> Array:
        """The most layers of a stage that may be computed again in less than `limit` seconds; 0: none. [n]

        It may be more than that, and never is less.
        """
        stage = self.space.stage(groups)
        # With state on the host a longer pass may hide something, so that time says nothing of k.
        if (FULL, None) not in self.space.again or self.states[0] > 0 or not np.isfinite(limit):
            return stage
        pair = self.states[0], self.moved[0]
        whole, _ = self._seconds(self._ways(groups, FULL, *pair))
        one, _ = self._seconds(self._ways(groups, FULL, *pair, 1 / stage))
        # What lies on the straight line is a guess, and holds only if one layer more is too slow.
        each = (whole - one) / np.maximum(stage - 1, 1)
        guess = np.floor(np.clip(1 + (limit - one) / np.maximum(each, 1e-12), 0, stage))
        more, _ = self._seconds(self._ways(groups, FULL, *pair, np.minimum(guess + 1, stage) / stage))
        sure = (more >= limit) & ~by_cost(self._table(groups))
        return np.where(sure, guess, stage)

    def _possible(self, groups: Columns, most: Array) -> Mask:
        """Which groups fit in some way that computes again no more than `most` layers. [n]"""
        held = np.zeros(most.size, dtype=np.bool_)
        for mode, share in self.space.again:
            again = np.maximum(most, 1) / self.space.stage(groups) if share is None else share
            # A byte that lies on the host is one less on the device, and the host has only so many.
            every = self._within(self._ways(groups, mode, self.states[-1], self.moved[-1], again), 0.0)
            room = self.base.host_bytes * HOST_PART
            some = self._within(self._ways(groups, mode, self.states[0], self.moved[0], again), room)
            held |= every & some & ((most > 0) | (share is not None))
        return held

    def _moved(self, best: Ways, at: Index, most: Array, bound: Array, limit: float) -> None:
        """Take in the fastest ways with each pair of shares on the host, of the groups `at`."""
        pairs = (at.size, self.states.size, self.moved.size)
        group, state, moved = (axis.ravel() for axis in np.indices(pairs))
        open_ = np.ones(group.size, dtype=np.bool_)
        for mode, share in self.space.again:
            # A group that takes no longer than its bound is done.
            hope = bound[at] < np.minimum(limit, best.seconds[at] * _LESS)
            index = np.flatnonzero(open_ & hope[group] & ((share is not None) | (most[group] > 0)))
            if not index.size:
                continue
            groups = taken(best.groups, at[group[index]])
            ways = self._ways(
                groups,
                mode,
                self.states[state[index]],
                self.moved[moved[index]],
                1.0 if share is None else share,
            )
            if share is None:
                ways = self._least(ways, most[group[index]])
            bytes, fit = self._bytes(ways)
            if mode == NONE:
                enough = np.zeros(pairs, dtype=np.bool_)
                enough.ravel()[index[fit]] = True
                # With shares that suffice, larger ones need not be looked at.
                larger = _beyond(enough).ravel()
                fit = fit & ~larger[index]
                open_ &= ~larger
            fine = index[fit]
            waits = self._take(best, at[group[fine]], taken(ways, fit), bytes[fit])
            if mode == NONE:
                open_[fine[~waits]] = False

    def _take(self, best: Ways, at: Index, ways: Columns, bytes: Array) -> Mask:
        """Take in ways that fit, of the groups `at`, where they are faster; which might be shorter with more. [ways]

        Those of them that compute layers again go on to more layers.
        """
        seconds, waits = self._seconds(ways)
        waited, before = waits, np.full(at.size, np.inf)
        while at.size:
            # Several ways may be of one group: the last that is put stays, so the best is put last.
            order = np.lexsort((-bytes, -seconds))
            sorted_ = taken(ways, order)
            better = seconds[order] < best.seconds[at[order]]
            best.put(at[order], sorted_, seconds[order], bytes[order], better)
            stage = self.space.stage(ways)
            more = np.round(ways["recomputed"] * stage) + 1
            counted = (ways["recompute"] == FULL) & ((FULL, None) in self.space.again)
            helps = (seconds < before) | by_cost(self._table(ways))
            on = waits & counted & (more <= stage) & helps
            at, before, ways = at[on], seconds[on], {**taken(ways, on), "recomputed": (more / stage)[on]}
            bytes, _ = self._bytes(ways)
            seconds, waits = self._seconds(ways)
        return waited

    def _least(self, ways: Columns, most: Array) -> Columns:
        """With the fewest recomputed layers that fit, `most` of them where none does."""
        stage = self.space.stage(ways)
        _, fit = self._bytes({**ways, "recomputed": most / stage})
        high = most.copy()
        # Where the most does not suffice, fewer do not either.
        low = np.where(fit, 0.0, high - 1)
        while (index := np.flatnonzero(high - low > 1)).size:
            middle = np.ceil((low[index] + high[index]) / 2)
            _, fit = self._bytes({**taken(ways, index), "recomputed": middle / stage[index]})
            low[index], high[index] = np.where(fit, low[index], middle), np.where(fit, middle, high[index])
        return {**ways, "recomputed": high / stage}

    def _ways(
        self,
        groups: Columns,
        mode: int,
        state: Array | float,
        moved: Array | float,
        recomputed: Array | float = 1.0,
    ) -> Columns:
        n = groups["micro"].size
        values = (float(mode), recomputed, state, moved)
        return {**groups, **{name: np.broadcast_to(v, n) for name, v in zip(COLUMNS, values, strict=True)}}

    def _table(self, rows: Columns) -> Table:
        return self.base.replaced(**{name: rows[name] for name in SPREAD if name in rows})

    def _bytes(self, ways: Columns) -> tuple[Array, Mask]:
        """Bytes of the fullest rank, and whether they fit. [n]"""
        n = ways["micro"].size
        table = self._table(ways)
        bytes = np.broadcast_to(sum_of(memory(table)), n)
        fit = (
            fits(table, bytes, self.constants.memory_constants)
            if self.bounded
            else np.ones(n, dtype=np.bool_)
        )
        return bytes, np.broadcast_to(fit, n)

    def _within(self, ways: Columns, elsewhere: Array | float) -> Mask:
        """Whether they fit the device but for `elsewhere` bytes, whatever the host holds. [n]"""
        n = ways["micro"].size
        if not self.bounded:
            return np.ones(n, dtype=np.bool_)
        table = self._table(ways)
        peak = np.broadcast_to(sum_of(memory(table)), n)
        return np.broadcast_to(within(table, peak - elsewhere, self.constants.memory_constants), n)

    def _seconds(self, ways: Columns) -> tuple[Array, Mask]:
        """Seconds of a step, and whether computing more again might make it shorter. [n]"""
        n = ways["micro"].size
        table = self._table(ways)
        parts = seconds_by_kind(table, self.constants)
        waits = (parts["host"] > 0) | by_cost(table)
        return np.broadcast_to(sum_of(parts), n), np.broadcast_to(waits, n)


def _beyond(enough: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Pairs of shares [groups, states, moved] that are larger, in one or both, than a pair that is `enough`."""
    reached = np.logical_or.accumulate(np.logical_or.accumulate(enough, axis=1), axis=2)
    beyond = np.zeros_like(enough)
    beyond[:, 1:] |= reached[:, :-1]
    beyond[:, :, 1:] |= reached[:, :, :-1]
    return beyond
