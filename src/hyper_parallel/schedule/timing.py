"""When each action of a schedule runs, what each rank waits for, and what it holds.

A rank runs its actions in its order, and each as soon as its input is there: start = max(end of the rank's action
before, arrival of the input), the longest path over orders and data dependencies. A forward pass needs the stage
before, a backward pass (or its INPUT half) the stage after, the last stage's own forward pass, and a WEIGHT half its
INPUT half. Transfers over one border in one direction follow one another; they share nothing else.

Actions that run as a pair (`Schedule.pairs`) start when the inputs of both are there, and end together. All of the
pair's time is the first one's; the second one starts and ends at its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.costs import Costs

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Kinds as numbers, which index tables."""
KINDS = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT)
_CODES = {kind: code for code, kind in enumerate(KINDS)}


class DeadlockError(StrategyError):
    """A schedule whose ranks wait for one another, or for an action that no rank runs."""


@dataclass(frozen=True)
class Bubble:
    """Seconds in which one rank computes nothing, by cause."""

    fill: float
    """Before its first action."""
    waiting: float
    """Between its actions."""
    drain: float
    """After its last action, until the last rank has ended."""

    @property
    def total(self) -> float:
        """Seconds of all causes."""
        return self.fill + self.waiting + self.drain


@dataclass(frozen=True)
class Timing:
    """A schedule's times with given costs."""

    starts: tuple[tuple[float, ...], ...]
    """By rank, in its order."""
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    """Seconds from the first start to the last end."""
    bubbles: tuple[Bubble, ...]
    """By rank."""
    peaks: tuple[float, ...]
    """Most that a rank holds of what its forward passes save, by rank; in the unit of `Costs.saved`."""


def time_schedule(schedule: Schedule, costs: Costs, begins: Sequence[float] | None = None) -> Timing:
    """Start and end of each action, bubbles and peaks of a complete schedule.

    `begins`: by rank, when it may run its first action; the time before that is no bubble. Raises StrategyError when
    the costs are of another number of stages, and DeadlockError when the orders wait in a circle.
    """
    if costs.stages != schedule.stages:
        raise StrategyError(
            f"schedule {schedule.name} has {schedule.stages} stages, and costs are given for {costs.stages}"
        )
    orders = encode(schedule)
    pairs = [schedule.pairs_of(rank) for rank in range(schedule.ranks)] if schedule.pairs else None
    starts, ends = run_orders(orders, schedule.placement, schedule.micro_batches, costs, begins, pairs)
    makespan = max((e[-1] for e in ends if e), default=0.0)
    return Timing(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        makespan=makespan,
        bubbles=tuple(
            bubble(s, e, makespan, begin)
            for s, e, begin in zip(starts, ends, begins or (0.0,) * schedule.ranks, strict=True)
        ),
        peaks=tuple(peak(order, costs) for order in orders),
    )


def bubble(starts: Sequence[float], ends: Sequence[float], makespan: float, begin: float = 0.0) -> Bubble:
    """The bubble of a rank that may run its first action at `begin`."""
    if not starts:
        return Bubble(makespan - begin, 0.0, 0.0)
    waiting = math.fsum(starts[i + 1] - ends[i] for i in range(len(starts) - 1))
    return Bubble(starts[0] - begin, waiting, makespan - ends[-1])


def encode(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Each rank's order as pairs (kind number · stages + stage, micro-batch)."""
    stages = schedule.stages
    offset = {kind: code * stages for kind, code in _CODES.items()}
    return [[(offset[a.kind] + a.stage, a.micro_batch) for a in order] for order in schedule.orders]


def decode(
    name: str, placement: Sequence[int], orders: Sequence[Sequence[tuple[int, int]]], micro_batches: int
) -> Schedule:
    """The schedule whose encoding is `orders`."""
    stages = len(placement)
    return Schedule(
        name,
        tuple(placement),
        tuple(tuple(Action(KINDS[q // stages], q % stages, m) for q, m in order) for order in orders),
        micro_batches,
    )


def durations(costs: Costs, placement: Sequence[int]) -> tuple[list[float], list[float]]:
    """(seconds on the rank, seconds until the next stage has the result) by kind number · stages + stage."""
    stages = costs.stages
    seconds = [*costs.forward, *costs.backward, *costs.input, *costs.weight]
    delays = [0.0] * (4 * stages)
    for border, transfer in enumerate(costs.transfers):
        if placement[border] == placement[border + 1]:
            continue
        for q in (border, stages + border + 1, 2 * stages + border + 1):
            delays[q] = transfer
    return seconds, delays


def run_orders(
    orders: Sequence[Sequence[tuple[int, int]]],
    placement: Sequence[int],
    micro_batches: int,
    costs: Costs,
    begins: Sequence[float] | None = None,
    pairs: Sequence[Collection[int]] | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of encoded orders, by rank; `begins` as of `time_schedule`, `pairs` as `Schedule.pairs`.

    Raises DeadlockError.
    """
    stages = len(placement)
    seconds, delays = durations(costs, placement)
    block = stages * micro_batches
    # One slot for each input that an action waits for: activations, gradients, and a WEIGHT half's INPUT half.
    arrival: list[float | None] = [None] * (3 * block)
    arrival[:micro_batches] = [0.0] * micro_batches
    base = [k * block + s * micro_batches for k in (0, 1, 1, 2) for s in range(stages)]
    # Where the result goes; -1: nowhere.
    gives = [-1] * (4 * stages)
    for s in range(stages):
        gives[s] = base[s + 1] if s + 1 < stages else base[stages + s]
        if s:
            gives[stages + s] = gives[2 * stages + s] = base[stages + s - 1]
    halves = range(2 * stages, 3 * stages)
    link = [0.0] * (4 * stages)
    blocked: dict[int, int] = {}
    position, free = [0] * len(orders), list(begins) if begins else [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    work = list(range(len(orders)))
    while work:
        rank = work.pop()
        order, now = orders[rank], free[rank]
        at, last = position[rank], len(order)
        began, ended = starts[rank], ends[rank]
        paired = pairs[rank] if pairs else ()
        while at < last:
            q, m = order[at]
            slot = base[q] + m
            ready = arrival[slot]
            if ready is not None and at in paired:
                # Both inputs have to be there.
                slot = base[order[at + 1][0]] + order[at + 1][1]
                ready = _later(ready, arrival[slot])
            if ready is None:
                blocked[slot] = rank
                break
            if ready > now:
                now = ready
            began.append(now)
            now += seconds[q] if not paired else _spent(order, at, paired, seconds, costs)
            ended.append(now)
            at += 1
            if q in halves:
                arrival[base[q + stages] + m] = now
            target = gives[q]
            if target >= 0:
                delay = delays[q]
                if delay:
                    sent = link[q] if link[q] > now else now
                    link[q] = arrived = sent + delay
                else:
                    arrived = now
                target += m
                arrival[target] = arrived
                if target in blocked:
                    waiter = blocked.pop(target)
                    if waiter != rank:
                        work.append(waiter)
        position[rank], free[rank] = at, now
    _refuse_stuck(orders, position, stages)
    return starts, ends


def _refuse_stuck(orders: Sequence[Sequence[tuple[int, int]]], position: Sequence[int], stages: int) -> None:
    """Raise DeadlockError if a rank has not come to the end of its order."""
    stuck = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
    if not stuck:
        return
    waits = "; ".join(
        f"rank {rank} at {Action(KINDS[q // stages], q % stages, m)}"
        for rank in stuck[:4]
        for q, m in [orders[rank][position[rank]]]
    )
    raise DeadlockError(
        f"the schedule deadlocks: {len(stuck)} of {len(orders)} ranks wait for results that never come ({waits}). "
        "Order each rank's actions so that none comes before one that it needs"
    )


def _later(one: float, other: float | None) -> float | None:
    return None if other is None else max(one, other)


def _spent(
    order: Sequence[tuple[int, int]],
    at: int,
    paired: Collection[int],
    seconds: Sequence[float],
    costs: Costs,
) -> float:
    """Seconds of the action at a place of an order with pairs: of a pair the first one has all."""
    if at - 1 in paired:
        return 0.0
    one = order[at][0]
    if at not in paired:
        return seconds[one]
    other = order[at + 1][0]
    total, stages = seconds[one] + seconds[other], costs.stages
    if one // stages != FORWARD:
        one, other = other, one
    return total - costs.hides(one % stages, other % stages, split=other // stages == INPUT)


def peak(order: Sequence[tuple[int, int]], costs: Costs) -> float:
    """Most that an encoded order holds at once. It depends on the order alone, not on times."""
    left = [s - r for s, r in zip(costs.saved, costs.released, strict=True)]
    change = [
        *costs.saved,
        *(-s for s in costs.saved),
        *(-r for r in costs.released),
        *(-rest for rest in left),
    ]
    held = most = 0.0
    for q, _ in order:
        held += change[q]
        if held > most:
            most = held
    return most
