"""Selected idle intervals, and the tier slot of each storage.

A storage goes to the first space with room for its slot. What is counted here is never less than what its moves
need in the end: state needs its slot always, anything else from where its first store may begin to the use behind its
last gap. Gaps that have to be taken are chosen from the beginning, in the space where the host computes.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.offloading.schedule.array_types import Flags, Ints
from hyper_parallel.offloading.schedule.idle_intervals import Gaps
from hyper_parallel.offloading.schedule.live_profile import LiveProfile
from hyper_parallel.offloading.schedule.problem import Problem


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
