"""List scheduling on one compute queue and one communication queue per axis.

What is given to a device is one list. It runs so:

- kernels run one after the other, in the list's order;
- a collective begins when the kernels before it in the list have ended, and those before it in its own queue;
- a wait holds every kernel behind it until its collective has ended.

So where a collective begins and where it is waited for decide what runs beside it. The order is built step by step
(list scheduling: Graham, *Bounds on Multiprocessing Timing Anomalies*, SIAM J. Appl. Math. 17(2), 1969), always with
what is on the longest path to the end among all that waits for nothing:

    level(v) = seconds(v) + max over what follows v of level                          `_levels`

Of micro-batches that run side by side, that one has its turn that comes soonest to its next collective, so that it is
sent while another one computes; kernel by kernel in turn, all would wait at the same time:

    lead(v) = seconds(v) + min over what follows v of lead; 0 of a collective          `_leads`

A collective is given to its queue when that would run empty before the next kernel ends, so that a more urgent one may
still overtake. Waits come right before the first thing that needs them; or, since what a collective reads is held until
it was waited for, when it has ended for `patience` times as long as it took, so that a wait costs nothing even where a
collective is slower by that much than it is taken to be.

Two bounds keep memory in check. Within a lane (a micro-batch) nothing runs further ahead of the first job that was
passed over than `window` seconds of the list as it was; and nothing is begun that would hold more than `budget` bytes,
as long as there is anything else to run. The order depends on the arguments alone, so that ranks that have the same
arguments have the same order.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.simulator.host_queue import QueueClock
from hyper_parallel.trace.live_bytes import LiveBytes

COMPUTE = "compute"
FREE = ""
"""The queue of what takes no time, such as a view: it runs right before the first job that needs it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One node of the list; its index is its place."""

    seconds: float
    queue: str
    """`compute`, `comm:<axis>`, or FREE."""
    after: tuple[int, ...] = ()
    """What must come before it in the list: lower indices."""
    waits: int | None = None
    """The collective that it waits for."""
    makes: tuple[tuple[int, int], ...] = ()
    """(storage, bytes) that it allocates."""
    uses: tuple[int, ...] = ()
    """Storages that must be there while it runs; each is freed after the last of its users. What it makes too."""
    lane: int = 0
    """Jobs of different lanes overtake each other freely; a lower lane goes first."""


@dataclass(frozen=True)
class Arranged:
    """An order, and what it comes to."""

    order: tuple[int, ...]
    seconds: float
    """Predicted time, with every collective alone on its link."""
    bytes: int
    """Most that is allocated at once, of what jobs make."""


def arrange(
    jobs: Sequence[Job],
    *,
    window: float = math.inf,
    budget: float = math.inf,
    together: int = 1,
    slowdown: float = 1.0,
    patience: float = math.inf,
) -> Arranged:
    """A new order of `jobs`, which are given in an order that is legal.

    `together` lanes are equally urgent, further ones fill their gaps. `slowdown`: how many times as long a kernel
    takes beside a collective. `patience`: as above; waits come as late as can be when left out.
    """
    return _Arranging(jobs, window, budget, together, slowdown, patience).arranged()


def replayed(jobs: Sequence[Job], order: Sequence[int] | None = None, *, slowdown: float = 1.0) -> Arranged:
    """The outcome of an order; the order in which the jobs are given when left out."""
    clock: QueueClock[str] = QueueClock(slowdown)
    ends: dict[int, float] = {}
    memory = _Memory(jobs)
    taken = list(range(len(jobs))) if order is None else list(order)
    for index in taken:
        job = jobs[index]
        memory.ran(job)
        if job.waits is not None:
            clock.wait(ends[job.waits])
        elif job.queue == COMPUTE:
            clock.run(job.seconds)
        elif job.queue != FREE:
            ends[index] = clock.begin(job.queue, job.seconds)
    return Arranged(tuple(taken), max([clock.now, *clock.free.values()]), memory.live.most)


class _Memory:
    """Bytes that are allocated as jobs run."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._users = Counter(storage for job in jobs for storage in job.uses)
        self._sizes: dict[int, int] = {}
        self.live = LiveBytes()

    def ran(self, job: Job) -> None:
        for storage, size in job.makes:
            self._sizes[storage] = size
            self.live.add(size)
        for storage in job.uses:
            self._users[storage] -= 1
            if not self._users[storage]:
                self.live.add(-self._sizes.get(storage, 0))


class _Arranging:
    """One pass over the jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        window: float,
        budget: float,
        together: int,
        slowdown: float,
        patience: float,
    ) -> None:
        self.jobs, self.budget, self.patience = jobs, budget, patience
        self.order: list[int] = []
        self.clock: QueueClock[str] = QueueClock(slowdown)
        self.clock.free = {job.queue: 0.0 for job in jobs if job.queue not in (COMPUTE, FREE)}
        self.ends: list[float] = [0.0] * len(jobs)
        """Of collectives."""
        self.due: list[float] = [0.0] * len(jobs)
        """When everything that a job waits for has ended."""
        self.emitted = bytearray(len(jobs))
        self.then: list[list[int]] = [[] for _ in jobs]
        self.pending = [0] * len(jobs)
        for index, job in enumerate(jobs):
            self.pending[index] = len(job.after)
            for other in job.after:
                assert other < index, f"job {index} comes after {other}, which is behind it"
                self.then[other].append(index)
        levels = _levels(jobs, self.then)
        self.leads = _leads(jobs, self.then)
        self.rank = [(job.lane // together, -levels[index], index) for index, job in enumerate(jobs)]
        self.memory = _Memory(jobs)
        self.lanes = _Lanes(jobs, window)
        self.kernels: dict[int, list[tuple[tuple[int, float, int], int]]] = {job.lane: [] for job in jobs}
        """By lane the kernels that wait for nothing, the most urgent first."""
        self.lane = min(self.kernels, default=0)
        """Of the last kernel."""
        self.begins: dict[str, list[tuple[tuple[int, float, int], int]]] = {
            name: [] for name in self.clock.free
        }
        self.waits: list[list[int]] = [[] for _ in jobs]
        """Of collectives."""
        for index, job in enumerate(jobs):
            if job.waits is not None:
                self.waits[job.waits].append(index)
        self.over: list[tuple[float, int]] = []
        """When each collective that was begun can be waited for at no cost."""
        self.stalled: list[tuple[float, tuple[int, float, int], int]] = []
        """What waits for a collective that runs, the soonest first."""

    def arranged(self) -> Arranged:
        for index in [index for index, pending in enumerate(self.pending) if not pending]:
            self._opened(index)
        while True:
            self._admit()
            kernel = self._next_kernel()
            took = self.jobs[kernel].seconds if kernel is not None else 0.0
            if self._begin_until(self.clock.now + took, force=kernel is None and not self.stalled):
                if kernel is not None:
                    self._offer(kernel)
                continue
            if kernel is not None:
                self._run(kernel)
            elif self.stalled:
                self.clock.wait(self.stalled[0][0])
            else:
                break
        for index in range(len(self.jobs)):
            self._emit(index)
        return replayed(self.jobs, self.order, slowdown=self.clock.slowdown)

    # What may run.

    def _opened(self, first: int) -> None:
        """Everything that a job comes after is in the list."""
        pending = [first]
        while pending:
            index = pending.pop()
            job = self.jobs[index]
            if job.waits is not None:
                self.due[index] = max(self.due[index], self.ends[job.waits])
            if job.queue == FREE:
                if not self.then[index] and job.waits is None and self.due[index] <= self.clock.now:
                    self._emit(index)  # nothing needs it: left for later it would hold what it uses
                self._passed(index, pending)
            else:
                self.lanes.ready(index)

    def _passed(self, index: int, opened: list[int]) -> None:
        kernel = self.jobs[index].queue != FREE
        for other in self.then[index]:
            if not kernel and self.due[index] > self.due[other]:
                self.due[other] = self.due[index]
            self.pending[other] -= 1
            if not self.pending[other]:
                opened.append(other)

    def _admit(self) -> None:
        """Sort what has come within its lane's window, and what no longer has to wait."""
        while self.over and self.over[0][0] <= self.clock.now:
            for index in self.waits[heapq.heappop(self.over)[1]]:
                if all(self.emitted[other] for other in self.jobs[index].after):
                    self._emit(index)
        for index in self.lanes.admitted():
            self._offer(index)
        while self.stalled and self.stalled[0][0] <= self.clock.now:
            self._offer(heapq.heappop(self.stalled)[2])

    def _offer(self, index: int) -> None:
        queue = self.jobs[index].queue
        if self.due[index] > self.clock.now:
            heapq.heappush(self.stalled, (self.due[index], self.rank[index], index))
        elif queue == COMPUTE:
            heapq.heappush(self.kernels[self.jobs[index].lane], (self.rank[index], index))
        else:
            heapq.heappush(self.begins[queue], (self.rank[index], index))

    def _next_kernel(self) -> int | None:
        """Take the most urgent kernel that fits; of lanes that are equally urgent, of the one that comes soonest to its
        next collective. Where nothing fits and nothing is waited for, take the earliest of the list."""
        tops = [(lane, waiting[0]) for lane, waiting in self.kernels.items() if waiting]
        tops.sort(key=lambda top: (top[1][0][0], self.leads[top[1][1]], top[0] != self.lane, top[1]))
        lanes = [lane for lane, _ in tops]
        aside: list[int] = []
        chosen = None
        for lane in lanes:
            waiting = self.kernels[lane]
            tried = 0
            while waiting and chosen is None and tried < 16:
                index = heapq.heappop(waiting)[1]
                if self._fits(index):
                    chosen = index
                else:
                    aside.append(index)
                    tried += 1
        if chosen is None and aside and not self.stalled:
            chosen = min(aside)
            aside.remove(chosen)
        for index in aside:
            self._offer(index)
        return chosen

    def _begin_until(self, time: float, force: bool) -> bool:
        """Give collectives to queues that would be empty before `time`; whether there was one."""
        for queue, waiting in self.begins.items():
            if waiting and (self.clock.free[queue] < time or force):
                index = waiting[0][1]
                if self._fits(index) or force:
                    heapq.heappop(waiting)
                    self._begin(index)
                    return True
        return False

    # What runs.

    def _run(self, index: int) -> None:
        self._emit(index)
        self.clock.run(self.jobs[index].seconds)
        self.lane = self.jobs[index].lane
        self._after(index)

    def _begin(self, index: int) -> None:
        job = self.jobs[index]
        self._emit(index)
        self.ends[index] = self.clock.begin(job.queue, job.seconds)
        if self.patience < math.inf:
            heapq.heappush(self.over, (self.ends[index] + self.patience * job.seconds, index))
        self._after(index)

    def _after(self, index: int) -> None:
        self.lanes.issued(index)
        opened: list[int] = []
        self._passed(index, opened)
        for other in opened:
            self._opened(other)

    def _emit(self, index: int) -> None:
        """Put a job into the list, and before it what takes no time and was left until now."""
        stack = [index]
        while stack:
            at = stack[-1]
            if self.emitted[at]:
                stack.pop()
                continue
            left = [other for other in self.jobs[at].after if not self.emitted[other]]
            if left:
                stack.extend(reversed(left))
                continue
            stack.pop()
            self.emitted[at] = 1
            self.order.append(at)
            self.memory.ran(self.jobs[at])

    def _fits(self, index: int) -> bool:
        allocated = sum(size for _, size in self.jobs[index].makes)
        return not allocated or self.memory.live.alive + allocated <= self.budget


class _Lanes:
    """How far each lane has come, and what is within its window."""

    def __init__(self, jobs: Sequence[Job], window: float) -> None:
        self._window = window
        self._jobs = jobs
        self._place = [0.0] * len(jobs)
        self._members: dict[int, list[int]] = {}
        ends: Counter[int] = Counter()
        for index, job in enumerate(jobs):
            if job.queue != FREE:
                self._place[index] = ends[job.lane]  # type: ignore[assignment]
                ends[job.lane] += job.seconds  # type: ignore[assignment]
                self._members.setdefault(job.lane, []).append(index)
        self._first = dict.fromkeys(self._members, 0)
        self._done = bytearray(len(jobs))
        self._ready: dict[int, list[int]] = {lane: [] for lane in self._members}
        self._changed = set(self._members)

    def ready(self, index: int) -> None:
        """A job may run, as far as what comes before it is concerned."""
        lane = self._jobs[index].lane
        heapq.heappush(self._ready[lane], index)
        self._changed.add(lane)

    def issued(self, index: int) -> None:
        """A job was put into the list."""
        self._done[index] = 1
        lane = self._jobs[index].lane
        members, first = self._members[lane], self._first[lane]
        if members[first] == index:
            while first < len(members) and self._done[members[first]]:
                first += 1
            self._first[lane] = first
            self._changed.add(lane)

    def admitted(self) -> list[int]:
        """The jobs that came within their lane's window since the last call."""
        found = []
        for lane in sorted(self._changed):
            members, first, waiting = self._members[lane], self._first[lane], self._ready[lane]
            limit = self._place[members[first]] + self._window if first < len(members) else math.inf
            while waiting and self._place[waiting[0]] <= limit:
                found.append(heapq.heappop(waiting))
        self._changed.clear()
        return found


def _levels(jobs: Sequence[Job], then: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of the longest path from the start of each job to the end."""
    levels = [0.0] * len(jobs)
    for index in range(len(jobs) - 1, -1, -1):
        longest = max((levels[other] for other in then[index]), default=0.0)
        levels[index] = jobs[index].seconds + longest
    return levels


def _leads(jobs: Sequence[Job], then: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of kernels from the start of each job to the next collective that follows from it."""
    leads = [0.0] * len(jobs)
    for index in range(len(jobs) - 1, -1, -1):
        if jobs[index].queue in (COMPUTE, FREE):
            soonest = min((leads[other] for other in then[index]), default=math.inf)
            leads[index] = jobs[index].seconds + soonest
    return leads
