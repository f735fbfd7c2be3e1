"""Idle intervals of all storages, as columns; those that are selected, and live bytes beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.offloading.schedule.problem import Buffer, Problem, Rate
from hyper_parallel.trace.live_bytes import wrapped

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

BLOCK = 256
"""Nodes that share a list of the gaps that hold them."""

# Live bytes at each node of a step that repeats, kept up to date (`trace.live_bytes` in incremental form).
#
# A stretch of places `first` … `end` − 1 may continue in the next step (places from n on); since the step repeats, it
# then wraps around to the first nodes. Changing or querying a stretch costs one pass over it.


class LiveProfile:
    """Bytes at each node, in `at`: int64 [n], or float64 where bytes are a fluid."""

    __slots__ = ("at",)

    def __init__(self, at: NDArray[Any]) -> None:
        self.at = at

    def copy(self) -> LiveProfile:
        """One that changes by itself."""
        return LiveProfile(self.at.copy())

    def with_all(self, first: Ints, end: Ints, count: Ints) -> LiveProfile:
        """One with many stretches added at once: of each its first place, its end, and its bytes."""
        n = self.at.size
        change = np.zeros(2 * n + 1, dtype=self.at.dtype)
        np.add.at(change, first, count)
        np.subtract.at(change, end, count)
        more = np.cumsum(change[: 2 * n])
        return LiveProfile(self.at + more[:n] + more[n:])

    @property
    def peak(self) -> int:
        """The most bytes at any node."""
        return int(self.at.max(initial=0))

    def add(self, first: int, end: int, count: int) -> None:
        """Add `count` bytes to a stretch; where `end` lies before `first`, subtract them from end … first − 1."""
        if end < first:
            first, end, count = end, first, -count
        if end <= self.at.size:
            self.at[first:end] += count
            return
        for begin, stop in wrapped(first, end, self.at.size):
            self.at[begin:stop] += count

    def most(self, first: int, end: int) -> int:
        """The most bytes at a node of a stretch."""
        return max(int(self.at[a:z].max(initial=0)) for a, z in wrapped(first, end, self.at.size))

    def first_over(self, first: int, end: int, limit: int) -> int:
        """The first place of a stretch with more than `limit` bytes; its end where there is none."""
        if first >= end:
            return first
        for begin, stop in wrapped(first, end, self.at.size):
            over = self.at[begin:stop] > limit
            at = int(over.argmax())
            if over[at]:
                return first + at
            first += stop - begin
        return end

    def under_from(self, first: int, end: int, limit: int) -> int:
        """The first place of a stretch from which on, to its end, no node has more than `limit` bytes."""
        if first >= end:
            return end
        for begin, stop in reversed(wrapped(first, end, self.at.size)):
            over = self.at[begin:stop][::-1] > limit
            at = int(over.argmax())
            if over[at]:
                return end - at
            end -= stop - begin
        return first


# Idle intervals of all storages, as columns.
#
# Gaps between two writes of a storage share a *version*: one copy out serves them all. `turn` orders the gaps of a
# version; of state it goes around the step's end. Whoever comes first among those that are chosen carries the store.


@dataclass(frozen=True)
class Gaps:
    """One row for each gap that holds a node, of storages that may move."""

    nodes: int
    storage: Ints
    gap: Ints
    """Its index among the gaps of its storage."""
    bytes: Ints
    open: Ints
    """First place at which a store may begin; negative where that is one of the step before."""
    after: Ints
    """First place at which the storage may be away."""
    used: Ints
    """Place of the next use; up to 2n of gaps that go around the step's end."""
    until: Ints
    """Last place at which it may leave."""
    since: Ints
    """First place at which it may be fetched."""
    version: Ints
    turn: Ints
    clean: Flags
    """Nobody on the device ever writes the storage: its slot is valid for good."""
    must: Flags
    """The gap has to be taken, since the host computes in the slot."""
    returns: Flags
    """It comes back at the gap's end."""
    out: Floats
    """[space, gap]: seconds of the copy out."""
    back: Floats
    """[space, gap]: seconds of the copy back."""
    updates: tuple[tuple[int, float, int, int], ...] = ()
    """Place and seconds of the host's work, the row of the gradient that it waits for, that of the parameter."""

    def __len__(self) -> int:
        return len(self.storage)

    @cached_property
    def first_use(self) -> Ints:
        """`used` as a place of this step."""
        found: Ints = self.used % self.nodes
        return found

    @cached_property
    def _blocks(self) -> list[Ints]:
        """For each `BLOCK` nodes in a row, the rows of the gaps that hold some of them."""
        n, found = self.nodes, []
        for first in range(0, n, BLOCK):
            end = min(first + BLOCK, n)
            here = (self.after < end) & (self.used > first)
            # A gap that goes around the step's end holds nodes of the next step too.
            found.append(np.flatnonzero(here | (self.used > n + first)))
        return found

    def near(self, node: int) -> Ints:
        """Rows of all gaps that hold a node and of some that do not, ascending."""
        return self._blocks[node // BLOCK]

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """The rows of each storage."""
        found: dict[int, list[int]] = {}
        for row, storage in enumerate(self.storage.tolist()):
            found.setdefault(storage, []).append(row)
        return found

    @cached_property
    def alike(self) -> dict[int, Ints]:
        """The rows of each version."""
        order = np.argsort(self.version, kind="stable")
        cuts = np.flatnonzero(np.diff(self.version[order])) + 1
        return {int(self.version[rows[0]]): rows for rows in np.split(order, cuts) if rows.size}

    def stores(self, chosen: Flags) -> Flags:
        """Whether each of the chosen gaps carries a store: the first of each version."""
        rows = np.flatnonzero(chosen)
        order = rows[np.lexsort((self.turn[rows], self.version[rows]))]
        first = np.ones(order.size, dtype=bool)
        first[1:] = self.version[order][1:] != self.version[order][:-1]
        found = np.zeros(len(self), dtype=bool)
        found[order[first]] = True
        return found & ~self.clean


def gaps_of(problem: Problem) -> Gaps:
    """The gaps of a problem, by storage and place."""
    n = problem.nodes
    rows: list[tuple[int, ...]] = []
    versions = 0
    for held in problem.held:
        gaps, opens = held.gaps(n), held.opens(n)
        if not held.movable or not gaps:
            continue
        turns, version_count, clean = _versions(held, len(gaps))
        for index, ((after, used), begins, (version, turn)) in enumerate(
            zip(gaps, opens, turns, strict=True)
        ):
            must = held.must if index == len(gaps) - 1 else None
            until, since = used - 1, after + 1
            if must is not None:
                until = must.update
                since = must.update + 1 if held.state else used
            returns = held.returns or must is None
            if after < used:
                rows.append(
                    (
                        *(held.storage, index, held.bytes, begins, after, used, until, since),
                        *(versions + version, turn, clean, must is not None, returns),
                    )
                )
        versions += version_count
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 13).T.copy()
    never_written, must_be, returning = (column.astype(bool) for column in columns[10:])
    out = _seconds([space.out for space in problem.spaces], columns[2])
    back = _seconds([space.back for space in problem.spaces], columns[2])
    out[:, never_written] = 0.0
    back[:, ~returning] = 0.0
    last = {int(columns[0, row]): row for row in np.flatnonzero(must_be).tolist()}
    return Gaps(
        nodes=n,
        storage=columns[0],
        gap=columns[1],
        bytes=columns[2],
        open=columns[3],
        after=columns[4],
        used=columns[5],
        until=columns[6],
        since=columns[7],
        version=columns[8],
        turn=columns[9],
        clean=never_written,
        must=must_be,
        returns=returning,
        out=out,
        back=back,
        updates=tuple(
            (update.place, update.seconds, last[update.gradient], last[update.parameter])
            for update in problem.updates
        ),
    )


def _seconds(rates: list[Rate], sizes: Ints) -> Floats:
    found = np.empty((len(rates), sizes.size))
    for space, rate in enumerate(rates):
        found[space] = rate.latency + sizes / rate.bandwidth
    return found


def _versions(held: Buffer, count: int) -> tuple[list[tuple[int, int]], int, bool]:
    """The (version, turn) of each gap; how many versions there are; whether nobody writes the storage."""
    writes = [index for index in range(count) if held.busy[index].writes]
    clean = held.state and not writes
    first = writes[0] if held.state and writes else 0
    found = [(0, 0)] * count
    version = turn = 0
    for step in range(count):
        index = (first + step) % count
        if step and held.busy[index].writes:
            version, turn = version + 1, 0
        found[index] = (version, turn)
        turn += 1
    return found, version + 1, clean


# Selected idle intervals, and the tier slot of each storage.
#
# A storage goes to the first space with room for its slot. What is counted here is never less than what its moves
# need in the end: state needs its slot always, anything else from where its first store may begin to the use behind its
# last gap. Gaps that have to be taken are chosen from the beginning, in the space where the host computes.


class Chosen:
    """A set of gaps that changes. Where all storages fit into the first space, nothing needs to be counted."""

    def __init__(self, problem: Problem, gaps: Gaps) -> None:
        self.gaps = gaps
        self.flags: Flags = np.zeros(len(gaps), dtype=bool)
        self.space: Ints = np.zeros(len(gaps), dtype=np.int64)
        """Of each gap, the index of the space that its storage has its slot in, or would have."""
        self._room = [space.bytes for space in problem.spaces]
        sizes = {held.storage: held.bytes for held in problem.held if held.storage in gaps.rows}
        self._state = {held.storage for held in problem.held if held.state}
        index = {space.name: at for at, space in enumerate(problem.spaces)}
        self._fixed = {held.storage: index[held.must.space] for held in problem.held if held.must is not None}
        """Storage that has to be in a space, and its index."""
        first = not any(self._fixed.values())
        self.ample = bool(self._room) and first and sum(sizes.values()) <= self._room[0]
        self._used = [LiveProfile(np.zeros(gaps.nodes, dtype=np.int64)) for _ in self._room]
        """Bytes of the slots in each space."""
        for storage, space in self._fixed.items():
            self.space[gaps.rows[storage]] = space
        self.holds = not [row for row in np.flatnonzero(gaps.must).tolist() if not self.add(row)]
        """Whether there is room for what has to be away."""

    def copy(self) -> Chosen:
        """One that changes by itself."""
        other = object.__new__(Chosen)
        other.gaps, other._room, other._state, other.ample = self.gaps, self._room, self._state, self.ample
        other._fixed, other.holds = self._fixed, self.holds
        other.flags, other.space = self.flags.copy(), self.space.copy()
        other._used = self._used if self.ample else [used.copy() for used in self._used]
        return other

    def add(self, row: int) -> bool:
        """Choose a gap; False, and nothing changes, where no space has room."""
        if self.flags[row]:
            return True
        if not self.ample and not self._make_room(row):
            return False
        self.flags[row] = True
        return True

    def drop(self, row: int) -> None:
        """Choose a gap no longer."""
        assert not self.gaps.must[row], "what has to be away"
        if not self.flags[row]:
            return
        before = self._span(row)
        self.flags[row] = False
        if not self.ample:
            self._count(row, before, -1)
            self._count(row, self._span(row), 1)

    def _make_room(self, row: int) -> bool:
        gaps = self.gaps
        rows = gaps.rows[int(gaps.storage[row])]
        before = self._span(row)
        self.flags[row] = True
        wanted = self._span(row)
        self.flags[row] = False
        self._count(row, before, -1)
        first, last = wanted
        # A storage only ever goes on to slower spaces, so that whoever tries again comes to an end.
        storage, here = int(gaps.storage[row]), int(self.space[row])
        for space in range(here, here + 1 if storage in self._fixed else len(self._room)):
            if self._used[space].most(first, last) + gaps.bytes[row] <= self._room[space]:
                self.space[rows] = space
                self._count(row, wanted, 1)
                return True
        self._count(row, before, 1)
        return False

    def _span(self, row: int) -> tuple[int, int]:
        """Nodes at which the slot of a gap's storage is needed."""
        gaps = self.gaps
        chosen = [one for one in gaps.rows[int(gaps.storage[row])] if self.flags[one]]
        if not chosen:
            return (0, 0)
        if int(gaps.storage[row]) in self._state:
            return (0, gaps.nodes)
        return int(gaps.open[chosen[0]]), min(int(gaps.used[chosen[-1]]) + 1, gaps.nodes)

    def _count(self, row: int, span: tuple[int, int], sign: int) -> None:
        self._used[self.space[row]].add(*span, sign * int(self.gaps.bytes[row]))
