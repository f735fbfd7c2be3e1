"""Memory choices: the best mix of keep, recompute and offload for each strategy.

A group is a strategy with degrees, micro-batch, splits, order and schedule. A way of a group recomputes nothing, the
core of attention, or k layers of a stage, and puts shares of the optimizer state and of the activations on the host.
Memory and time are monotone in these choices:

* more on the host with the same k takes less device memory and, by itself, no less time
  (`cost_model.optimizer_step.fetched`);
* apart from exposed copies, a step's time does not fall with k.

So for each kind of recompute, the fastest way (`MemoryChoice.fastest`) is found as follows:

* k is at least what fits with some shares, in closed form (`memory_bounds`), and at most what is faster than a limit;
* a way with this least k that waits for no copy is the fastest of its kind, and with k = 0 the fastest of all;
* in groups where it waits for copies, every way that may be faster is estimated: each affordable k with each pair of
  minimal shares that suffice for it. (Longer passes may hide more of the copies.)

Where stages are cut by cost, longer layers may be cut more evenly: such groups are treated as if they waited, and no k
is excluded as too slow.

The least memory (`MemoryChoice.smallest`) needs as much on the host as fits there, and none, the core, or all layers
recomputed: activations fall with k, and the memory that one recomputed layer needs does not depend on k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.columns import Array, Columns, Mask, chunks, taken, unique
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import HOST_PART, by_stage, fits, memory
from hyper_parallel.planner.cost_model.pipeline import placed
from hyper_parallel.planner.cost_model.step import seconds_by_kind
from hyper_parallel.planner.lower_bounds import ROUNDING, Room, by_cost
from hyper_parallel.planner.space import FULL, NONE, SELECTIVE, StrategySpace
from hyper_parallel.planner.table import SPREAD, Table, sum_of

Index = npt.NDArray[np.intp]
COLUMNS = ("recompute", "recomputed", "state_on_host", "weights_on_host", "activations_on_host")
_LESS = 1 - 1e-8
"""A group whose best way takes no longer than its bound is done, rounding apart."""
_ANY = 1e30
"""Bytes, where there is no limit."""


class Ways:
    """The best way found so far for each group; seconds are inf where none was found."""

    def __init__(self, groups: Columns) -> None:
        n = groups["micro"].size
        self.groups = groups
        self.rows: Columns = {**groups, **{name: np.zeros(n) for name in COLUMNS}}
        self.seconds: Array = np.full(n, np.inf)
        self.bytes: Array = np.full(n, np.inf)
        self.weighed = 0
        """Ways whose time was estimated."""

    def put(self, at: Index, ways: Columns, seconds: Array, better: Mask) -> None:
        """Replace the ways of the groups `at` where they are `better`: the last of each group stays."""
        self.weighed += at.size
        for name in COLUMNS:
            self.rows[name][at[better]] = ways[name][better]
        self.seconds[at[better]] = seconds[better]


class MemoryChoice:
    """Finds the best way of groups of one space."""

    def __init__(self, space: StrategySpace, base: Table, constants: Constants, bounded: bool = True) -> None:
        """`base`: what all rows have in common. `bounded`: by the memory of device and host."""
        self.space, self.base, self.constants, self.bounded = space, base, constants, bounded
        self.moved = space.on_host["activations_on_host"]
        self.shares = [(*level, float(moved)) for level in space.levels for moved in self.moved]
        """Of state, weights and activations on the host: each level with each share of the activations."""
        k = constants
        self.device = k.usable(float(base.capacity[0])) if bounded else _ANY
        self.host = float(base.host_bytes[0]) * HOST_PART if bounded else _ANY

    def fastest(self, groups: Columns, bound: Array, limit: Array) -> Ways:
        """The fastest way that fits, of groups that take at least `bound` seconds. [n]

        Of groups whose fastest takes as many seconds as their `limit`, or more, some way or none.
        """
        best = Ways(groups)
        open_ = bound < limit
        if self.bounded:
            open_ &= np.broadcast_to(placed(self._table(groups)), open_.size)
        for mode, share in self.space.again:
            # A group that takes no longer than its bound is done.
            some = open_ & (bound < np.minimum(limit, best.seconds * _LESS))
            if mode == SELECTIVE and (NONE, 1.0) in self.space.again and np.all(self.base.flash > 0):
                # Where a kernel keeps the scores on the chip, it takes no less memory than to keep all.
                some &= np.isfinite(best.seconds)
            at = np.flatnonzero(some)
            if at.size:
                settled = self._of_mode(best, at, mode, share, bound, limit)
                open_[at[settled]] &= mode != NONE
        found = np.flatnonzero(best.seconds < limit)
        if found.size:
            best.bytes[found] = self._bytes(taken(best.rows, found))
        return best

    def smallest(self, groups: Columns) -> Ways:
        """The way with the least memory; the fastest of those that have it."""
        best = Ways(groups)
        for mode, share in self.space.again:
            room, which = self._room(groups, mode, 1.0 if share is None else share)
            peaks = np.stack(
                [
                    np.where(room.elsewhere(*some) <= self.host * (1 + ROUNDING), room.peak(*some), np.inf)
                    for some in self.shares
                ]
            )[:, which]
            peaks = np.where(self._legal(groups).T, peaks, np.inf)
            # Which of nearly equal ones is least is the model's to say.
            near = np.isfinite(peaks) & (peaks <= np.min(peaks, axis=0) * (1 + ROUNDING))
            pair, at = np.nonzero(near)
            for part in chunks(at.size):
                some, of = at[part], pair[part]
                ways = self._ways(taken(groups, some), mode, of, 1.0 if share is None else share)
                bytes, fit = self._fits(ways)
                seconds, _ = self._seconds(ways)
                order = np.flatnonzero(fit)[np.lexsort((-seconds[fit], -bytes[fit]))]
                some, ways, seconds, bytes = some[order], taken(ways, order), seconds[order], bytes[order]
                least = bytes < best.bytes[some]
                least |= (bytes == best.bytes[some]) & (seconds < best.seconds[some])
                best.put(some, ways, seconds, least)
                best.bytes[some[least]] = bytes[least]
        return best

    def _of_mode(
        self, best: Ways, at: Index, mode: int, share: float | None, bound: Array, limit: Array
    ) -> Mask:
        """Put the fastest ways of one kind of recompute; which groups have a way that waits for no copy. [at]"""
        groups = taken(best.groups, at)
        stage = self.space.stage(groups)
        least = self._least(groups, mode, share, stage)
        settled = np.zeros(at.size, dtype=np.bool_)
        fine = np.flatnonzero(np.isfinite(least).any(axis=1))
        if not fine.size:
            return settled
        at, least, stage, groups = at[fine], least[fine], stage[fine], taken(groups, fine)
        if share is None:
            most = self._affordable(groups, limit[at])
            least = np.where(least <= most[:, None], least, np.inf)
            some = np.flatnonzero(np.isfinite(least).any(axis=1))
            if not some.size:
                return settled
            fine, at, least, stage, groups = (
                fine[some],
                at[some],
                least[some],
                stage[some],
                taken(groups, some),
            )
        # Of the shares with which the fewest layers suffice, the first: the least state, then the least activations.
        first = np.argmin(least, axis=1)
        count = least[np.arange(at.size), first]
        waits = self._take(best, at, self._ways(groups, mode, first, _share(share, count, stage)))
        settled[fine] = ~waits
        on = np.flatnonzero(waits & (bound[at] < np.minimum(limit[at], best.seconds[at] * _LESS)))
        if on.size:
            least[np.arange(at.size), first] += 1e-3
            self._others(best, at[on], mode, share, least[on], limit[at[on]])
        return settled

    def _others(
        self, best: Ways, at: Index, mode: int, share: float | None, least: Array, limit: Array
    ) -> None:
        """Take in what may be faster than ways that wait; `least` layers suffice for each pair [groups, pairs]."""
        groups = taken(best.groups, at)
        stage = self.space.stage(groups)
        known = np.round(least)
        most = (
            self._affordable(groups, np.minimum(limit, best.seconds[at]))
            if share is None
            else np.zeros(at.size)
        )
        # From where on smaller shares suffice, these are no slower.
        until = np.minimum(_smaller(known, len(self.space.levels)), most[:, None] + 1)
        # What was looked at has been marked.
        start = np.where(np.isfinite(known), known + (least > known), np.inf)
        counts = np.where(start < until, until - start, 0).astype(np.intp)
        row, pair = np.nonzero(counts)
        times = counts[row, pair]
        offset = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        layers = np.repeat(start[row, pair], times) + offset
        row, pair = np.repeat(row, times), np.repeat(pair, times)
        for part in chunks(row.size):
            some = row[part]
            ways = self._ways(taken(groups, some), mode, pair[part], _share(share, layers[part], stage[some]))
            self._take(best, at[some], ways)

    def _least(self, groups: Columns, mode: int, share: float | None, stage: Array) -> Array:
        """Layers that have to be computed again, with each pair of shares; inf where none fit. [groups, pairs]

        0 where how many is given.
        """
        if not self.bounded:
            return np.where(self._legal(groups), float(share is None), np.inf)
        room, which = self._room(groups, mode, share)
        most = (*self.space.levels[-1], float(self.moved[-1]))
        floor = room.floor(*most, self.host, float(share is None))
        fine = np.flatnonzero(floor <= self.device * (1 + ROUNDING))
        stages = np.empty(floor.size)
        stages[which] = stage
        some, stages = room.take(fine), stages[fine, None]
        state, weights, activations = np.array(self.shares).T

        def layers(more: float) -> Array:
            """Whatever the order in which bytes are added up, at least or at most."""
            share_ = some.least(state, weights, activations, self.device * more, self.host * more)
            found = np.full((floor.size, len(self.shares)), np.inf)
            found[fine] = np.maximum(np.ceil(share_ * stages), float(share is None))
            return np.where(legal, found[which], np.inf)

        legal = self._legal(groups)

        found, sure = layers(1 + ROUNDING), layers(1 - ROUNDING)
        close = found != sure
        if close.any():
            row, of = np.nonzero(close)
            ways = self._ways(taken(groups, row), mode, of, _share(share, found[row, of], stage[row]))
            _, fit = self._fits(ways)
            found[row[~fit], of[~fit]] = sure[row[~fit], of[~fit]]
        return found

    def _legal(self, groups: Columns) -> Mask:
        """Whether each group may have each set of shares on the host. [groups, sets]"""
        legal = [self.space.may_place(groups, *shares) for shares in self.shares]
        return np.broadcast_to(np.stack(legal, axis=1), (groups["micro"].size, len(self.shares)))

    def _room(self, groups: Columns, mode: int, share: float | None) -> tuple[Room, Index]:
        """Bytes of groups that differ in them, and which of these each group is."""
        # The order in which axes are laid is the links' matter.
        first, which = unique({name: groups[name] for name in groups if name in SPREAD and name != "order"})
        some = taken(groups, first)
        nothing = {**some, **{name: np.zeros(first.size) for name in COLUMNS}}
        full = {**nothing, "recompute": np.full(first.size, float(mode))}
        if share is not None:
            return Room.of(by_stage(self._table({**full, "recomputed": np.full(first.size, share)}))), which
        again = self._table({**full, "recomputed": np.ones(first.size)})
        return Room.of(by_stage(self._table(nothing)), by_stage(again)), which

    def _affordable(self, groups: Columns, limit: Array) -> Array:
        """The most layers of a stage that may be computed again in less than `limit` seconds; 0: none. [n]

        It may be more than that, and never is less. Copies are left out: with none a step is no slower.
        """
        stage = self.space.stage(groups)
        if not np.isfinite(limit).any():
            return stage

        def seconds(share: Array | float) -> Array:
            table = self._table(groups).replaced(recompute=float(FULL), recomputed=share)
            return np.broadcast_to(sum_of(seconds_by_kind(table, self.constants)), stage.size)

        whole, one = seconds(1.0), seconds(1 / stage)
        # What lies on the straight line is a guess, and holds only if one layer more is too slow.
        each = (whole - one) / np.maximum(stage - 1, 1)
        guess = np.floor(np.clip(1 + (limit - one) / np.maximum(each, 1e-12), 0, stage))
        more = seconds(np.minimum(guess + 1, stage) / stage)
        return np.where((more >= limit) & ~by_cost(self._table(groups)), guess, stage)

    def _take(self, best: Ways, at: Index, ways: Columns) -> Mask:
        """Take in ways of the groups `at` where they are faster; which might be shorter with more. [ways]"""
        seconds, waits = self._seconds(ways)
        # Several ways may be of one group: the last that is put stays, so the best is put last.
        order = np.argsort(-seconds, kind="stable")
        at = at[order]
        best.put(at, taken(ways, order), seconds[order], seconds[order] < best.seconds[at])
        return waits

    def _ways(self, groups: Columns, mode: int, pair: Index, recomputed: Array | float) -> Columns:
        n = groups["micro"].size
        values = (float(mode), recomputed, *np.array(self.shares)[pair].T)
        return {**groups, **{name: np.broadcast_to(v, n) for name, v in zip(COLUMNS, values, strict=True)}}

    def _table(self, rows: Columns) -> Table:
        return self.base.replaced(**{name: rows[name] for name in SPREAD if name in rows})

    def _bytes(self, ways: Columns) -> Array:
        """Bytes of the fullest rank. [n]"""
        return np.broadcast_to(sum_of(memory(self._table(ways))), ways["micro"].size)

    def _fits(self, ways: Columns) -> tuple[Array, Mask]:
        """Bytes of the fullest rank, and whether they fit. [n]"""
        bytes = self._bytes(ways)
        if not self.bounded:
            return bytes, np.ones(bytes.size, dtype=np.bool_)
        fit = fits(self._table(ways), bytes, self.constants)
        return bytes, np.broadcast_to(fit, bytes.size)

    def _seconds(self, ways: Columns) -> tuple[Array, Mask]:
        """Seconds of a step, and whether computing more again might make it shorter. [n]"""
        n = ways["micro"].size
        table = self._table(ways)
        parts = seconds_by_kind(table, self.constants)
        waits = (parts["host"] > 0) | by_cost(table)
        return np.broadcast_to(sum_of(parts), n), np.broadcast_to(waits, n)


def _share(share: float | None, layers: Array, stage: Array) -> Array | float:
    return layers / stage if share is None else share


def _smaller(least: Array, states: int) -> Array:
    """The least of all pairs of shares [groups, pairs] that are smaller in one or both; inf where there is none."""
    grid = least.reshape(least.shape[0], states, -1)
    reached = np.minimum.accumulate(np.minimum.accumulate(grid, axis=1), axis=2)
    found = np.full_like(grid, np.inf)
    found[:, 1:] = reached[:, :-1]
    found[:, :, 1:] = np.minimum(found[:, :, 1:], reached[:, :, :-1])
    return found.reshape(least.shape)
