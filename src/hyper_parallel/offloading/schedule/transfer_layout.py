"""Layouts: live bytes under the selected transfers, kept up to date while the planner shifts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Chosen, Flags, Floats, Gaps, Ints, LiveProfile
from hyper_parallel.offloading.schedule.problem import Move, Problem, Replayed


@dataclass(frozen=True)
class Times:
    """When the host is where: seconds at each place of two steps, as predicted."""

    arrives: Floats
    """The host comes there."""
    starts: Floats
    """The node there starts, after its waits."""
    step: float

    @classmethod
    def of(cls, arrives: Sequence[float] | Floats, starts: Sequence[float] | Floats) -> Times:
        """From those of one step, the step's end included."""
        step = float(arrives[-1])
        return cls(_twice(arrives), _twice(starts), step)

    @classmethod
    def replayed(cls, replay: Replayed) -> Times:
        """As they come to be."""
        return cls.of(replay.arrives, replay.starts)

    @classmethod
    def stalled(cls, problem: Problem, stalls: Floats) -> Times:
        """The times of the problem with stalls before nodes."""
        starts = np.asarray(problem.starts) - problem.starts[0]
        until = np.append(np.cumsum(stalls), stalls.sum())
        later = starts + until
        return cls.of(later - np.append(stalls, 0.0), later)

    def comes(self, places: Ints) -> Floats:
        """When the host comes to places, also to those of the step before."""
        found: Floats = self.arrives[places % (self.arrives.size // 2)]
        return found + self.step * (places // (self.arrives.size // 2))


def _twice(times: Sequence[float] | Floats) -> Floats:
    step = np.asarray(times)
    return np.concatenate([step[:-1], step[:-1] + step[-1], [2 * step[-1]]])


class Layout:
    """Moves of the chosen gaps. The places of other gaps mean nothing, nor does `store` of who carries none."""

    def __init__(self, gaps: Gaps, base: Ints, budget: int, chosen: Chosen, leave: Ints, fetch: Ints) -> None:
        self.gaps, self.base, self.budget, self.chosen = gaps, base, budget, chosen
        self.leave, self.fetch = leave, fetch
        self.store: Ints = gaps.after.copy()
        self.since: Ints = gaps.since
        """Of each gap, from which place on a fetch finds what it is to bring."""
        self.count()

    def copy(self) -> Layout:
        """One that changes by itself."""
        other = object.__new__(Layout)
        other.gaps, other.base, other.budget, other.since = self.gaps, self.base, self.budget, self.since
        other.chosen = self.chosen.copy()
        other.leave, other.fetch, other.store = self.leave.copy(), self.fetch.copy(), self.store.copy()
        other.live = self.live.copy()
        return other

    def count(self) -> None:
        rows = self.rows
        absences = self.leave[rows], self.fetch[rows], -self.gaps.bytes[rows]
        self.live = LiveProfile(self.base).with_all(*absences)

    @property
    def rows(self) -> Ints:
        """Rows of the chosen gaps, ascending."""
        return np.flatnonzero(self.chosen.flags)

    @property
    def stores(self) -> Flags:
        """Whether each of them carries a store."""
        return self.gaps.stores(self.chosen.flags)

    def fits(self) -> bool:
        return self.live.peak <= self.budget

    def leave_at(self, row: int, place: int) -> None:
        """Leave earlier or later."""
        self.live.add(int(self.leave[row]), place, int(self.gaps.bytes[row]))
        self.leave[row] = place
        self.store[row] = min(int(self.store[row]), place)

    def fetch_at(self, row: int, place: int) -> None:
        """Come back earlier or later."""
        self.live.add(place, int(self.fetch[row]), int(self.gaps.bytes[row]))
        self.fetch[row] = place

    def drop(self, row: int) -> None:
        """Stay here instead."""
        self.live.add(int(self.leave[row]), int(self.fetch[row]), int(self.gaps.bytes[row]))
        self.chosen.drop(row)

    def join(self, row: int, leave: int, fetch: int) -> bool:
        """Go as well; False where no space has room."""
        if not self.chosen.add(row):
            return False
        self.leave[row], self.fetch[row] = leave, fetch
        self.live.add(leave, fetch, -int(self.gaps.bytes[row]))
        return True

    def moves(self, problem: Problem) -> tuple[Move, ...]:
        """In the order of places and storages."""
        gaps, stores = self.gaps, self.stores
        found = [
            Move(
                int(gaps.storage[row]),
                problem.spaces[int(self.chosen.space[row])].name,
                int(gaps.gap[row]),
                int(self.store[row]) if stores[row] else None,
                int(self.leave[row]),
                int(self.fetch[row]),
            )
            for row in self.rows.tolist()
        ]
        found.sort(
            key=lambda move: (move.leave if move.store is None else move.store, move.storage, move.gap)
        )
        return tuple(found)
