"""The offload scheduling problem in numbers: node times, buffers with use intervals, tiers.

Places are indices of the step's nodes. A storage that is given up right before node `leave` and taken again right
before node `fetch` is not there at the nodes leave … fetch − 1. So, whatever moves,

    live(k) = Σ bytes of storages that are there at node k + Σ bytes taken at k without a storage     `Problem.profile`
    live(k) ≥ Σ bytes of storages in use at k + Σ bytes taken at k                                    `Problem.needed`

The step repeats: places from n on are those of the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hyper_parallel.trace.live_bytes import profile, wrapped

if TYPE_CHECKING:
    from hyper_parallel.offloading.schedule.transfers import Move


@dataclass(frozen=True, slots=True)
class UseInterval:
    """Nodes in a row during which a storage is in use, and may not move."""

    first: int
    last: int
    """Inclusive."""
    writes: bool
    """What is in the storage changes."""


@dataclass(frozen=True, slots=True)
class ForcedOffload:
    """The last gap of a storage has to be taken, since the host computes in its slot: an update of the optimizer.

    A gradient goes out, and does not come back. A parameter, which is state, leaves without a store, and what comes
    back is new.
    """

    space: str
    """Where the storage goes in every gap."""
    update: int
    """Place of the node that begins the update: what goes out has left before it, what comes back is fetched behind."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage."""

    storage: int
    bytes: int
    kind: str
    """`parameter`, `activation`, … (`graph.Kind`)."""
    busy: tuple[UseInterval, ...]
    """Ascending and disjoint, at least one. Without `state` it is born with the first and dies after the last."""
    state: bool
    """It lives across steps, so that there is a gap from the last busy stretch to the first one of the next step."""
    movable: bool = True
    name: str = ""
    must: ForcedOffload | None = None

    @property
    def returns(self) -> bool:
        """Whether it comes back from its last gap."""
        return self.must is None or self.state

    def life(self, nodes: int) -> tuple[int, int]:
        """The first place at which it is alive where it never moves, and the first one at which it no longer is."""
        if self.state:
            return 0, nodes
        return self.busy[0].first, nodes if self.must is not None else self.busy[-1].last + 1

    def pinned(self, nodes: int) -> list[tuple[int, int]]:
        """The stretches of places (first, end) at which no plan can do without it: its uses, or all of its life."""
        if not self.movable:
            return [self.life(nodes)]
        return [(busy.first, busy.last + 1) for busy in self.busy]

    def gaps(self, nodes: int) -> list[tuple[int, int]]:
        """Of each gap the first place after the stretch before it, and the place of the stretch behind it."""
        found = [(before.last + 1, after.first) for before, after in pairwise(self.busy)]
        if self.state:
            found.append((self.busy[-1].last + 1, nodes + self.busy[0].first))
        elif self.must is not None:
            found.append((self.busy[-1].last + 1, nodes))
        return found

    def opens(self, nodes: int) -> list[int]:
        """Of each gap the first place at which what it moves is final, and a store for it may begin.

        That is behind the last busy stretch that writes, of what none writes behind the first one. Of state it may be
        one of the step before: a negative place.
        """
        ends = [busy.last + 1 for busy in self.busy if busy.writes]
        last = ends[-1] - nodes if self.state and ends else self.busy[0].last + 1
        found = []
        for busy, _ in zip(self.busy, self.gaps(nodes), strict=False):
            last = busy.last + 1 if busy.writes else last
            found.append(last)
        return found


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that no storage stands for, from one node to another, inclusive."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Rate:
    """One direction of a link."""

    latency: float
    """Seconds of a copy beside those of its bytes."""
    bandwidth: float
    """B/s."""

    def seconds(self, count: int) -> float:
        """Of a copy that has the link to itself."""
        return self.latency + count / self.bandwidth


@dataclass(frozen=True, slots=True)
class OffloadTier:
    """Another tier: what may lie there, and how fast it goes there and comes back."""

    name: str
    bytes: int
    out: Rate
    back: Rate
    work: float | None = None
    """B/s at which the host reads and writes what lies there in an update; None where only the cluster says."""


@dataclass(frozen=True, slots=True)
class Update:
    """Work of the host on what lies in a space, beside the device and one after the other."""

    place: int
    """Of the node that begins it."""
    seconds: float
    gradient: int
    """The storage whose copy out it waits for."""
    parameter: int
    """The storage whose copy back waits for it."""


@dataclass(frozen=True)
class Problem:
    """A step's memory, to be brought under a budget."""

    starts: Sequence[float]
    """Seconds at which each of the n nodes begins when nothing waits for memory, and the step's end: n + 1 numbers."""
    held: tuple[Buffer, ...]
    """By ascending storage."""
    taken: tuple[Workspace, ...]
    spaces: tuple[OffloadTier, ...]
    """The fastest first; what does not fit into one goes to the next."""
    budget: int
    """Bytes that may be live on the device."""
    updates: tuple[Update, ...] = ()
    """By ascending place; their storages have to take their last gaps."""

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        """Of a step in which nothing waits for memory."""
        return self.starts[-1] - self.starts[0]

    def comes(self, place: int) -> float:
        """Seconds into the step at which the host comes to a place, also of the step before or behind, likewise."""
        return self.starts[place % self.nodes] - self.starts[0] + self.seconds * (place // self.nodes)

    @cached_property
    def by_storage(self) -> dict[int, Buffer]:
        """The storages by their numbers."""
        return {held.storage: held for held in self.held}

    def profile(self, moves: Iterable[Move] = ()) -> list[int]:
        """Live bytes at each node. Exact: what `graph.liveness` says of the step with these moves."""
        absences = (
            (first, end, -self.by_storage[move.storage].bytes)
            for move in moves
            for first, end in wrapped(move.leave, move.fetch, self.nodes)
        )
        lives = ((*held.life(self.nodes), held.bytes) for held in self.held)
        return profile((*lives, *self._workspaces(), *absences), self.nodes)

    def needed(self) -> list[int]:
        """Bytes that no plan can do without at each node: what is in use, and what may not move."""
        pinned = ((*part, held.bytes) for held in self.held for part in held.pinned(self.nodes))
        return profile((*pinned, *self._workspaces()), self.nodes)

    @property
    def working_set(self) -> int:
        """The least budget that any plan could meet."""
        return max(self.needed(), default=0)

    def _workspaces(self) -> list[tuple[int, int, int]]:
        return [(taken.first, taken.last + 1, taken.bytes) for taken in self.taken]
