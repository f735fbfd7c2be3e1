"""What is kept, computed again or moved to the host: the best way for strategies that lack only this.

A group is a strategy with degrees, micro-batch, splits, order and schedule. Its ways are: compute nothing again,
attention's core, or k layers of a stage, times shares of the optimizer's state and of the activations on the host. More
of any of them takes less memory and, by itself, no less time. So for the fastest way (`Kept.fastest`)

* where keeping everything on the device fits, that is it;
* k can be no more than what is faster than a limit, and if so much with all that may lie on the host does not fit, the
  group is left out;
* of shares with which nothing need be computed again, only the least matter, since more are no faster;
* for shares that are less, the fastest k is the least that fits, found by bisection.

One term is not of that kind: where copies to the host are what a step waits for, a longer pass costs nothing and hides
more of the gradients' reduction. Seconds then fall first and rise later in k, so the search goes on from the least k
for as long as that helps (`_take`).

The least memory is with all that may lie on the host there, and none, the core, or all layers computed again:
activations fall with k, and what a recomputed layer needs at once does not depend on it (`Kept.smallest`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.plan.constants import Constants
from hyper_parallel.plan.model.memory import fits, memory
from hyper_parallel.plan.model.step import seconds_by_kind, sum_of
from hyper_parallel.plan.space import FULL, NONE, Array, Columns, Mask, Space, full_like, taken
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
        self._whole(best)
        at = np.flatnonzero((best.seconds == np.inf) & (bound < limit))
        if not at.size:
            return best
        most = self._affordable(taken(groups, at), limit)
        at, most = self._possible(groups, at, most)
        if at.size:
            self._moved(best, at, most, bound, limit)
        return best

    def smallest(self, groups: Columns) -> Ways:
        """The way with the least memory; the fastest of those that have it."""
        best = Ways(groups)
        at = np.arange(best.seconds.size)
        for mode in self.space.modes:
            ways = self._ways(groups, mode, self.states[-1], self.moved[-1])
            bytes, fit = self._bytes(ways)
            seconds, _ = self._seconds(ways)
            least = (bytes < best.bytes) | ((bytes == best.bytes) & (seconds < best.seconds))
            best.put(at, ways, seconds, bytes, fit & least)
        return best

    def _whole(self, best: Ways) -> None:
        """Take in groups that fit as they are."""
        if NONE not in self.space.modes:
            return
        ways = self._ways(best.groups, NONE, self.states[0], self.moved[0])
        bytes, fit = self._bytes(ways)
        at = np.flatnonzero(fit)
        self._take(best, at, taken(ways, at), bytes[at])

    def _affordable(self, groups: Columns, limit: float) -> Array:
        """The most layers of a stage that may be computed again in less than `limit` seconds; 0: none. [n]

        At least: it may be more than that, and never is less.
        """
        stage = self.space.stage(groups)
        counted = FULL in self.space.modes and self.space.layers_counted
        # With state on the host a longer pass may hide something, so that time says nothing of k.
        if not counted or self.states[0] > 0 or not np.isfinite(limit):
            return stage
        pair = self.states[0], self.moved[0]
        all_, _ = self._seconds(self._ways(groups, FULL, *pair))
        one, _ = self._seconds(self._ways(groups, FULL, *pair, 1 / stage))
        # What lies on the straight line is tried, and taken for the answer only if one layer more is too slow.
        each = (all_ - one) / np.maximum(stage - 1, 1)
        guess = np.floor(np.clip(1 + (limit - one) / np.maximum(each, 1e-12), 0, stage))
        more, _ = self._seconds(self._ways(groups, FULL, *pair, np.minimum(guess + 1, stage) / stage))
        return np.where(more >= limit, guess, stage)

    def _possible(self, groups: Columns, at: Index, most: Array) -> tuple[Index, Array]:
        """Groups that fit in some way that computes again no more than `most` layers."""
        held = np.zeros(at.size, dtype=np.bool_)
        for mode in self.space.modes:
            some = taken(groups, at)
            share = np.maximum(most, 1) / self.space.stage(some) if mode == FULL else 1.0
            if mode == FULL and not self.space.layers_counted:
                share = float(self.space.recomputed[-1]) if self.space.recomputed else 1.0
            _, fit = self._bytes(self._ways(some, mode, self.states[-1], self.moved[-1], share))
            held |= fit & ((most > 0) | (mode != FULL))
        return at[held], most[held]

    def _moved(self, best: Ways, at: Index, most: Array, bound: Array, limit: float) -> None:
        """Take in the fastest ways of groups that do not fit as they are."""
        states, moved = self.states.size, self.moved.size
        group, state, share = (axis.ravel() for axis in np.indices((at.size, states, moved)))
        open_ = np.ones(group.size, dtype=np.bool_)
        for mode in self.space.modes:
            index = np.flatnonzero(
                open_ & (bound[at[group]] < np.minimum(limit, best.seconds[at[group]] * _LESS))
            )
            if mode == FULL:
                index = index[most[group[index]] > 0]
            if not index.size:
                continue
            ways = self._ways(
                taken(best.groups, at[group[index]]),
                mode,
                self.states[state[index]],
                self.moved[share[index]],
            )
            if mode == FULL:
                ways = self._least(ways, most[group[index]])
            bytes, fit = self._bytes(ways)
            if mode == NONE:
                # With shares that suffice, larger ones need not be looked at.
                enough = np.zeros((at.size, states, moved), dtype=np.bool_)
                enough[group[index[fit]], state[index[fit]], share[index[fit]]] = True
                below = np.zeros_like(enough)
                below[:, 1:] |= np.logical_or.accumulate(np.logical_or.accumulate(enough, axis=1), axis=2)[
                    :, :-1
                ]
                below[:, :, 1:] |= np.logical_or.accumulate(np.logical_or.accumulate(enough, axis=1), axis=2)[
                    :, :, :-1
                ]
                fit = fit & ~below.ravel()[index]
                open_ &= ~(below | enough).ravel()
            fine = np.flatnonzero(fit)
            self._take(best, at[group[index[fine]]], taken(ways, fine), bytes[fine])

    def _take(self, best: Ways, at: Index, ways: Columns, bytes: Array) -> None:
        """Forecast ways that fit and keep the faster ones; compute more again where a step waits for copies."""
        while at.size:
            seconds, waits = self._seconds(ways)
            # Several ways may be of one group: the last one that is put stays, so the fastest is put last.
            order = np.lexsort((-bytes, -seconds))
            at, seconds, bytes, waits, ways = (
                at[order],
                seconds[order],
                bytes[order],
                waits[order],
                taken(ways, order),
            )
            better = seconds < best.seconds[at]
            best.put(at, ways, seconds, bytes, better)
            stage = self.space.stage(ways)
            layers = np.where(ways["recompute"] == FULL, ways["recomputed"] * stage, 0.0)
            more = (
                waits
                & better
                & self.space.layers_counted
                & (FULL in self.space.modes)
                & (layers < stage - 0.5)
            )
            at, ways = at[more], taken(ways, more)
            if at.size:
                ways |= {**full_like(ways, recompute=float(FULL)), "recomputed": ((layers + 1) / stage)[more]}
                bytes, fit = self._bytes(ways)
                at, ways, bytes = at[fit], taken(ways, fit), bytes[fit]

    def _least(self, ways: Columns, most: Array) -> Columns:
        """With the fewest recomputed layers that fit, `most` of them where none does."""
        if not self.space.layers_counted:
            # Given shares are few: the least that fits.
            shares = self.space.recomputed or (1.0,)
            found = np.full(most.size, float(shares[-1]))
            for share in reversed(shares[:-1]):
                _, fit = self._bytes({**ways, **full_like(ways, recomputed=share)})
                found = np.where(fit, share, found)
            return {**ways, "recomputed": found}
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

    def _bytes(self, ways: Columns) -> tuple[Array, Mask]:
        """Bytes of the fullest rank, and whether they fit. [n]"""
        n = ways["micro"].size
        table = self.base.replaced(**{name: ways[name] for name in SPREAD})
        bytes = np.broadcast_to(sum_of(memory(table)), n)
        fit = (
            fits(table, bytes, self.constants.memory_constants)
            if self.bounded
            else np.ones(n, dtype=np.bool_)
        )
        return bytes, np.broadcast_to(fit, n)

    def _seconds(self, ways: Columns) -> tuple[Array, Mask]:
        """Seconds of a step, and whether it waits for copies from the host. [n]"""
        n = ways["micro"].size
        parts = seconds_by_kind(self.base.replaced(**{name: ways[name] for name in SPREAD}), self.constants)
        return np.broadcast_to(sum_of(parts), n), np.broadcast_to(parts["host"] > 0, n)
