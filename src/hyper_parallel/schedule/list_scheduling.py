"""List scheduling of pipeline actions on ranks with limited memory, forwards and backwards in time.

Whenever a rank is free it starts, of the actions whose input is there and whose memory fits, the one with the lowest
priority number (list scheduling: Graham, *Bounds on Multiprocessing Timing Anomalies*, SIAM J. Appl. Math. 17(2),
1969). Micro-batches are alike, so that within one stage and kind they run in their order, which loses nothing: where
two are exchanged their times can be exchanged too.

The same problem runs backwards in time, last actions first (`Problem.reversed`): what a WEIGHT half frees it then
takes. A schedule built from one end, and rebuilt from the other with its own times as priorities, gets shorter or
stays (double justification: Valls, Ballestín, Quintanilla, *Justification and RCPSP*, EJOR 165, 2005).

**No deadlock by memory.** Where a rank has several stages, a micro-batch takes memory several times before it frees
any. Only the oldest that still takes memory on the rank may take the last of it; others leave what the oldest is yet
to take (the banker's algorithm: Dijkstra, EWD 623).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.timing import BACKWARD, FORWARD, INPUT, WEIGHT, durations

_INFINITY = math.inf


@dataclass(frozen=True)
class Problem:
    """Classes of actions (one kind in one stage), numbered kind number · stages + stage, in one direction of time."""

    micro_batches: int
    stages: int
    ranks: int
    by_rank: tuple[tuple[int, ...], ...]
    """Classes of each rank."""
    rank_of: tuple[int, ...]
    seconds: tuple[float, ...]
    follows: tuple[tuple[tuple[int, float], ...], ...]
    """By class: classes that wait for it, each with the seconds of the transfer."""
    waits_for: tuple[int, ...]
    """By class: number of classes that it waits for."""
    takes: tuple[float, ...]
    """By class: memory taken at its start, 0 of classes that only free."""
    frees: tuple[float, ...]
    """By class: memory freed at its end."""
    caps: tuple[float, ...]
    """By rank."""

    @classmethod
    def build(
        cls, costs: Costs, placement: Sequence[int], micro_batches: int, caps: Sequence[float], *, split: bool
    ) -> Problem:
        """Forwards in time, with backward passes all split or all whole."""
        stages, ranks = costs.stages, len(caps)
        seconds, delays = durations(costs, placement)
        kinds = (FORWARD, INPUT, WEIGHT) if split else (FORWARD, BACKWARD)
        back = kinds[1]
        by_rank: list[list[int]] = [[] for _ in range(ranks)]
        follows: list[list[tuple[int, float]]] = [[] for _ in range(4 * stages)]
        takes, frees = [0.0] * (4 * stages), [0.0] * (4 * stages)
        for stage, rank in enumerate(placement):
            by_rank[rank] += [kind * stages + stage for kind in kinds]
            ahead, behind = FORWARD * stages + stage, back * stages + stage
            last = stage + 1 == stages
            follows[ahead].append((behind, 0.0) if last else (ahead + 1, delays[ahead]))
            if stage:
                follows[behind].append((behind - 1, delays[behind]))
            # What the INPUT half adds is reserved from the forward pass on.
            takes[ahead] = costs.saved[stage]
            if split:
                takes[ahead] += max(0.0, -costs.released[stage])
                frees[behind] = max(0.0, costs.released[stage])
                follows[behind].append((WEIGHT * stages + stage, 0.0))
                frees[WEIGHT * stages + stage] = takes[ahead] - frees[behind]
            else:
                frees[behind] = takes[ahead]
        return cls._linked(
            micro_batches, stages, by_rank, list(placement) * 4, seconds, follows, takes, frees, caps
        )

    @classmethod
    def _linked(
        cls,
        micro_batches: int,
        stages: int,
        by_rank: Sequence[Sequence[int]],
        rank_of: Sequence[int],
        seconds: Sequence[float],
        follows: Sequence[Sequence[tuple[int, float]]],
        takes: Sequence[float],
        frees: Sequence[float],
        caps: Sequence[float],
    ) -> Problem:
        waits_for = [0] * len(follows)
        for following in follows:
            for q, _ in following:
                waits_for[q] += 1
        return cls(
            micro_batches,
            stages,
            len(caps),
            tuple(map(tuple, by_rank)),
            tuple(rank_of),
            tuple(seconds),
            tuple(map(tuple, follows)),
            tuple(waits_for),
            tuple(takes),
            tuple(frees),
            tuple(caps),
        )

    def reversed(self) -> Problem:
        """The same problem with time running backwards. Micro-batch m is then number M − 1 − m."""
        follows: list[list[tuple[int, float]]] = [[] for _ in self.follows]
        for q, following in enumerate(self.follows):
            for other, delay in following:
                follows[other].append((q, delay))
        return self._linked(
            self.micro_batches,
            self.stages,
            self.by_rank,
            self.rank_of,
            self.seconds,
            follows,
            self.frees,
            self.takes,
            self.caps,
        )


@dataclass(frozen=True)
class Listed:
    """A schedule that list scheduling has built."""

    makespan: float
    starts: list[float]
    """By class · M + micro-batch; infinite for classes that do not run."""
    orders: list[list[tuple[int, int]]]
    """By rank: (class, micro-batch)."""


def list_schedule(problem: Problem, priority: Sequence[float], patience: float = 0.0) -> Listed:
    """Build a schedule. `priority` by class · M + micro-batch, lowest first.

    `patience`: as a share of the action that would start; for a more urgent one that is known to arrive within that
    time the rank waits instead.
    """
    count = problem.micro_batches
    seconds, follows, takes, frees = problem.seconds, problem.follows, problem.takes, problem.frees
    caps, rank_of = problem.caps, problem.rank_of
    classes = len(seconds)
    ready = [_INFINITY] * (classes * count)
    # Classes that wait for two others: the first arrival is kept until the second one comes.
    half: dict[int, float] = {}
    pairs = [n > 1 for n in problem.waits_for]
    for q, n in enumerate(problem.waits_for):
        if not n:
            ready[q * count : (q + 1) * count] = [0.0] * count
    done = [0] * classes
    takers = [[q for q in own if takes[q]] for own in problem.by_rank]
    # With room for a whole micro-batch beside this action, none can be in another's way.
    ample = [sum(takes[q] for q in own) if len(own) > 1 else 0.0 for own in takers]
    held, free = [0.0] * problem.ranks, [0.0] * problem.ranks
    starts = [_INFINITY] * (classes * count)
    orders: list[list[tuple[int, int]]] = [[] for _ in range(problem.ranks)]
    open_classes = [list(own) for own in problem.by_rank]
    slack = [cap * (1 + 1e-9) for cap in caps]
    events = [(0.0, rank) for rank in range(problem.ranks)]
    push, pop = heapq.heappush, heapq.heappop
    makespan = 0.0
    while events:
        now, rank = pop(events)
        if now < free[rank]:
            continue
        best = -1
        lowest = _INFINITY
        soon: list[tuple[float, float]] = []
        for q in open_classes[rank]:
            m = done[q]
            i = q * count + m
            arrival = ready[i]
            if arrival == _INFINITY:
                continue
            urgency = priority[i]
            if arrival <= now:
                if urgency >= lowest:
                    continue
            elif not patience:
                continue
            if takes[q]:
                room = slack[rank] - held[rank] - takes[q]
                if room < 0.0:
                    continue
                if room < ample[rank]:
                    own = takers[rank]
                    oldest = min([done[other] for other in own])
                    if m > oldest and room < sum([takes[o] for o in own if done[o] == oldest]):
                        continue
            if arrival <= now:
                lowest, best = urgency, q
            else:
                soon.append((arrival, urgency))
        if best < 0:
            continue
        if soon:
            until = now + patience * seconds[best]
            waits = [arrival for arrival, urgency in soon if urgency < lowest and arrival < until]
            if waits:
                push(events, (min(waits), rank))
                continue
        m = done[best]
        done[best] = m + 1
        if m + 1 == count:
            open_classes[rank].remove(best)
        starts[best * count + m] = now
        orders[rank].append((best, m))
        held[rank] += takes[best] - frees[best]
        end = now + seconds[best]
        free[rank] = end
        push(events, (end, rank))
        if end > makespan:
            makespan = end
        for q, delay in follows[best]:
            i = q * count + m
            arrival = end + delay
            if pairs[q]:
                other = half.pop(i, None)
                if other is None:
                    half[i] = arrival
                    continue
                if other > arrival:
                    arrival = other
            ready[i] = arrival
            target = rank_of[q]
            if free[target] <= arrival:
                push(events, (arrival, target))
    return Listed(makespan, starts, orders)


def ends_first(problem: Problem, built: Listed) -> list[float]:
    """Priorities for the problem in the other direction of time: what ended last comes first."""
    count = problem.micro_batches
    priorities = [_INFINITY] * len(built.starts)
    for order in built.orders:
        for q, m in order:
            priorities[q * count + count - 1 - m] = -(built.starts[q * count + m] + problem.seconds[q])
    return priorities


def mirrored(problem: Problem, built: Listed) -> list[list[tuple[int, int]]]:
    """Orders of a schedule that was built backwards in time, as they run forwards."""
    last = problem.micro_batches - 1
    return [[(q, last - m) for q, m in reversed(order)] for order in built.orders]
