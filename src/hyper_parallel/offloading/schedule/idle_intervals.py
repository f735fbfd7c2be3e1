"""Idle intervals of all storages, as columns.

Gaps between two writes of a storage share a *version*: one copy out serves them all. `turn` orders the gaps of a
version; of state it goes around the step's end. Whoever comes first among those that are chosen carries the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Flags, Floats, Ints
from hyper_parallel.offloading.schedule.problem import Buffer, Problem, Rate


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
    def rows(self) -> dict[int, list[int]]:
        """Of each storage its rows."""
        found: dict[int, list[int]] = {}
        for row, storage in enumerate(self.storage.tolist()):
            found.setdefault(storage, []).append(row)
        return found

    @cached_property
    def alike(self) -> dict[int, Ints]:
        """Of each version its rows."""
        order = np.argsort(self.version, kind="stable")
        cuts = np.flatnonzero(np.diff(self.version[order])) + 1
        return {int(self.version[rows[0]]): rows for rows in np.split(order, cuts) if rows.size}

    def stores(self, chosen: Flags) -> Flags:
        """Which of the chosen gaps carry a store: the first of each version."""
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
        turns, made, clean = _versions(held, len(gaps))
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
        versions += made
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
    """Of each gap (version, turn); how many versions there are; whether nobody writes the storage."""
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
