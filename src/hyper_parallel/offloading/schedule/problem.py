"""The offload scheduling problem in numbers (node times, buffers with use intervals, tiers), and plans for it.

Places are indices of the step's nodes. A storage that is given up right before node `leave` and taken again right
before node `fetch` is not there at the nodes leave … fetch − 1. So, whatever moves,

    live(k) = Σ bytes of storages that are there at node k + Σ bytes taken at k without a storage     `Problem.profile`
    live(k) ≥ Σ bytes of storages in use at k + Σ bytes taken at k                                    `Problem.needed`

The step repeats: places from n on are those of the next step. `replay` says how long a step takes with a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hyper_parallel.simulator.host_queue import QueueClock
from hyper_parallel.trace.live_bytes import profile, wrapped


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
        """For each gap, the first place after the stretch before it, and the place of the stretch behind it."""
        found = [(before.last + 1, after.first) for before, after in pairwise(self.busy)]
        if self.state:
            found.append((self.busy[-1].last + 1, nodes + self.busy[0].first))
        elif self.must is not None:
            found.append((self.busy[-1].last + 1, nodes))
        return found

    def opens(self, nodes: int) -> list[int]:
        """For each gap, the first place at which what it moves is final, and a store for it may begin.

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
        """Seconds of a copy that has the link to itself."""
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
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        """Seconds of a step in which nothing waits for memory."""
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


# Transfers: an offload plan, and its simulated step time (`replay`).
#
# Links are first in, first out, one for each direction of each space. A store is begun when the nodes before its place
# have run, and a fetch likewise; the node at `leave` waits for the store, and the next one that uses the storage waits
# for the fetch. A store need not wait until its storage is idle: it may begin as soon as what it copies is final.
#
#     begin(copy) = max(the host comes to its place, end of the copy before it on its link, end of an update of its
# slot)
#     begin(update) = max(the host comes to its node, end of the update before it, end of the copy of its gradient)
#     node k starts when node k − 1 has ended and every copy that is waited for before it has
#
# Right before a node the host begins stores, waits for the stores of what leaves, begins fetches (whose memory may have
# been given up just before) and waits for what the node uses. Of copies that begin at one place, the one that is waited
# for first goes first.

_STEPS = 16
_NOTHING = 1e-12
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that is away for (a part of) a gap between two uses.

    A place means "right before this node". busy[gap].last < leave < fetch ≤ the first node of the next busy stretch,
    and open ≤ store ≤ leave (`Held.opens`). Of state the gap after the last stretch ends at the first one of the next
    step, at a place from n on, and a store that begins in the step before does so at a negative place.
    """

    storage: int
    space: str
    gap: int
    """It follows the busy stretch of this index."""
    store: int | None
    """Where the copy begins, perhaps while the storage is read still; None where the space holds what is in it."""
    leave: int
    """Where the storage's memory is given up, the copy waited for."""
    fetch: int
    """Where the memory is taken again and the copy back begins. It is waited for right before the next use."""


STORE, LEAVE, FETCH, USE = range(4)
"""What moves do right before a node, in this order: a store begins, what leaves waits for its store, a fetch begins,
and what the node uses is waited for."""


class Event(NamedTuple):
    """Something that a move does right before a node. Events are sorted in the order in which they happen."""

    place: int
    """Of this step."""
    turn: int
    soon: int
    """Of a copy that begins: nodes until it is waited for. The most urgent goes first."""
    storage: int
    gap: int
    space: str


def events_of(problem: Problem, move: Move) -> Iterator[Event]:
    """The events of a move in a step; without a fetch where nothing comes back."""
    n, held = problem.nodes, problem.by_storage[move.storage]
    gaps, what = held.gaps(n), (move.storage, move.gap, move.space)
    used = gaps[move.gap][1]
    if move.store is not None:
        yield Event(move.store % n, STORE, move.leave - move.store, *what)
    yield Event(move.leave % n, LEAVE, 0, *what)
    if held.returns or move.gap < len(gaps) - 1:
        yield Event(move.fetch % n, FETCH, used - move.fetch, *what)
        yield Event(used % n, USE, 0, *what)


@dataclass(frozen=True)
class Replayed:
    """The outcome of a plan, step after step."""

    seconds: float
    """Of a step."""
    stall: float
    """Of it, seconds in which nodes wait for copies."""
    waits: dict[tuple[int, int], float]
    """(storage, gap) to the seconds that its copies are waited for, where there are any."""
    arrives: tuple[float, ...]
    """Seconds into the step at which the host comes to each node; one more: the step's end."""
    starts: tuple[float, ...]
    """Those at which each node starts, once what it waits for is over; one more: the step's end."""


@dataclass(frozen=True)
class Plan:
    """The moves of a step, in the order of (place, storage)."""

    moves: tuple[Move, ...]
    peak: int
    """The most live bytes, exactly."""
    seconds: float
    """Predicted seconds of a step (`replay`)."""
    stall: float
    """Seconds of them in which nodes wait for copies."""
    floor: int
    """The least budget that this planner can meet."""
    working_set: int
    """The least budget that any planner could meet."""


def replay(problem: Problem, moves: Iterable[Move]) -> Replayed:
    """Run steps on paper until they repeat, since copies of one may still be under way in the next; the mean of those
    that repeat counts, or the last one where none did in `_STEPS`."""
    links = {space.name: (space.back, space.out) for space in problem.spaces}
    at_place: dict[int, list[tuple[bool, _Copy, tuple[str, bool], float]]] = {}
    """By place, in their order: whether it begins, copy, link, seconds."""
    for event in sorted(event for move in moves for event in events_of(problem, move)):
        place, turn, _, storage, gap, space = event
        out, begins = turn <= LEAVE, turn in (STORE, FETCH)
        taken = links[space][out].seconds(problem.by_storage[storage].bytes) if begins else 0.0
        at_place.setdefault(place, []).append((begins, (storage, gap, out), (space, out), taken))
    updates = {update.place: update for update in problem.updates}
    todo = [(at, problem.comes(at), at_place.get(at, ())) for at in sorted({*at_place, *updates})]
    last = {held.storage: len(held.gaps(problem.nodes)) - 1 for held in problem.held if held.must is not None}
    worked: dict[_Copy, float] = {}
    """When the host has done what a copy brings back."""
    over: dict[_Copy, float] = {}
    clock: QueueClock[tuple[str, bool]] = QueueClock()
    step = problem.seconds
    end, seconds = 0.0, step
    # What is still under way when a step begins, as seconds that it will take, decides how it goes.
    seen: list[tuple[float, dict[_Copy, float]]] = [(0.0, {})]
    while len(seen) <= _STEPS:
        since, stall = end, 0.0
        waits: dict[tuple[int, int], float] = {}
        late_by: dict[int, float] = {}
        for at, comes, events in todo:
            clock.now = now = since + comes + stall
            for begins, copy, link, taken in events:
                if begins:
                    over[copy] = clock.begin(link, taken, worked.get(copy, 0.0))
                elif over.get(copy, 0.0) > now:
                    stall += (late := clock.wait(over[copy]))
                    now = clock.now
                    waits[copy[:2]] = waits.get(copy[:2], 0.0) + late
            late_by[at] = stall
            if at in updates:
                update = updates[at]
                gradient = (update.gradient, last[update.gradient], True)
                done = clock.begin(_UPDATES, update.seconds, over.get(gradient, 0.0))
                worked[update.parameter, last[update.parameter], False] = done
        end = since + step + stall
        left = {
            copy: round(until - end, 12)
            for times in (worked, over)
            for copy, until in times.items()
            if until - end > _NOTHING
        }
        known = next((at for at, (_, before) in enumerate(seen) if before == left), None)
        if known is not None:
            seconds = (end - seen[known][0]) / (len(seen) - known)
            break
        seen.append((end, left))
        seconds = end - since
    arrives, starts = _stretched(problem.starts, late_by)
    return Replayed(seconds, max(0.0, seconds - step), waits, arrives, starts)


def _stretched(
    starts: Sequence[float], late_by: dict[int, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When the host comes to each node and when it starts: `late_by` are the stalls up to each place that has any."""
    arrives: list[float] = []
    begins: list[float] = []
    late = 0.0
    for place, start in enumerate(starts):
        arrives.append(start - starts[0] + late)
        late = late_by.get(place, late)
        begins.append(start - starts[0] + late)
    return tuple(arrives), tuple(begins)


_UPDATES = ("", True)
"""The queue of the host's updates, beside those of the links: (space, whether copies go out to it)."""
_Copy = tuple[int, int, bool]
"""Storage, gap, and whether it goes out."""
