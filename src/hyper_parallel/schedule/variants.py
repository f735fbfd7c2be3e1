"""Placements and priority rules for list scheduling. A variant is a placement with backward passes split or whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.list_scheduling import Listed, Problem, ends_first, list_schedule, mirrored
from hyper_parallel.schedule.lower_bound import makespan_bound
from hyper_parallel.schedule.names import SPLITS_BACKWARD, named_schedule
from hyper_parallel.schedule.schedule import Schedule
from hyper_parallel.schedule.timing import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    decode,
    encode,
    peak,
    run_orders,
)
from hyper_parallel.schedule.v_shaped import v_placement
from hyper_parallel.strategy.schedule_name import ScheduleName


@dataclass(frozen=True)
class Rule:
    """Which kind of action goes first where several could start; those of one kind by their earliest times."""

    name: str
    order: tuple[int, int, int]
    """Places of the forward pass, of the backward pass or INPUT half, and of the WEIGHT half; equal: by times alone."""
    backwards: bool = False
    """Built from the end of the step."""
    patience: float = 0.0
    """Of `list_schedule`."""


RULES = (
    Rule("input gradients first", (1, 0, 2)),
    Rule("input gradients first, from the end", (2, 1, 0), backwards=True, patience=0.5),
    Rule("by earliest times", (0, 0, 1)),
    Rule("weight gradients first", (2, 1, 0)),
    Rule("forward passes first", (0, 1, 2)),
)
"""The most useful first: 150 random instances were judged by their distance to the bound."""


class Variant:
    """One placement with backward passes all split or all whole."""

    def __init__(
        self,
        name: str,
        placement: tuple[int, ...],
        costs: Costs,
        micro_batches: int,
        caps: Sequence[float],
        *,
        split: bool,
        free: bool,
    ) -> None:
        self.name = name if split else f"{name} with whole backward passes"
        self._split, self._free, self._caps = split, free, caps
        self._micro_batches = micro_batches
        self._whole_placement = placement
        self._parts = len(placement) // len(caps)
        # Neighbouring stages of one rank are scheduled as one, and written out in the end.
        self._merges = self._parts > 1 and placement[0] == placement[1]
        self._costs = costs.merged(self._parts) if self._merges else costs
        self._placement = tuple(range(len(caps))) if self._merges else placement
        forwards = Problem.build(self._costs, self._placement, micro_batches, caps, split=split)
        self._problems = (forwards, forwards.reversed())
        used = [q for own in forwards.by_rank for q in own]
        self.actions = len(used) * micro_batches
        """Of a schedule."""
        self.average = sum(forwards.seconds[q] for q in used) / len(used)
        """Seconds of an action."""
        self.bound = makespan_bound(self._costs, self._placement, micro_batches, caps)
        self.shortest = math.inf
        self.best = (False, Listed(math.inf, [], []))
        """Direction and schedule of the shortest one, in its own direction of time."""
        self.tried = False

    def lacking(self) -> str:
        """Says which rank's cap does not hold one micro-batch; empty if all do."""
        problem = self._problems[0]
        for rank, (own, cap) in enumerate(zip(problem.by_rank, self._caps, strict=True)):
            need = sum(problem.takes[q] for q in own)
            if need > cap * (1 + 1e-9):
                return (
                    f"rank {rank} may hold {cap:g}, and one micro-batch of its stages saves {need:g}. Raise its cap, "
                    "make micro-batches smaller, recompute layers, or cut the model into more stages"
                )
        return ""

    def priorities(self, rule: Rule) -> list[float]:
        """By class · M + micro-batch. Earliest times: on the path of one micro-batch, the next one a round later."""
        problem, count, stages = self._problems[rule.backwards], self._micro_batches, self._costs.stages
        order = [q for own in problem.by_rank for q in own]
        begins = dict.fromkeys(order, 0.0)
        for _ in range(2 * stages + 1):
            moved = False
            for q in order:
                for other, delay in problem.follows[q]:
                    if begins[other] < (time := begins[q] + problem.seconds[q] + delay):
                        begins[other], moved = time, True
            if not moved:
                break
        round_trip = max(sum(problem.seconds[q] for q in own) for own in problem.by_rank)
        whole = max(begins.values()) + round_trip * (count + 1)
        place = dict(zip((FORWARD, INPUT, WEIGHT), rule.order, strict=True)) | {BACKWARD: rule.order[1]}
        priorities = [math.inf] * (len(problem.seconds) * count)
        for q in order:
            first = begins[q] + place[q // stages] * whole
            priorities[q * count : (q + 1) * count] = [first + m * round_trip for m in range(count)]
        return priorities

    def place(self, backwards: bool, priorities: Sequence[float], patience: float = 0.0) -> Listed:
        """Build a list schedule."""
        self.tried = True
        return list_schedule(self._problems[backwards], priorities, patience)

    def rebuilding(self, backwards: bool, built: Listed) -> list[float]:
        """Priorities with which to build it anew from the other end."""
        return ends_first(self._problems[backwards], built)

    def keep(self, backwards: bool, built: Listed) -> None:
        """Remember it if it is this variant's shortest, or as short: the search then moves on from there."""
        if built.makespan <= self.shortest:
            self.shortest, self.best = built.makespan, (backwards, built)

    def timed(self, backwards: bool, built: Listed) -> Listed:
        """It, forwards in time, with the times that its orders come to."""
        return self._run(mirrored(self._problems[True], built) if backwards else built.orders)

    def _run(self, orders: list[list[tuple[int, int]]]) -> Listed:
        count = self._micro_batches
        begun, ended = run_orders(orders, self._placement, count, self._costs)
        starts = [math.inf] * (4 * self._costs.stages * count)
        for order, times in zip(orders, begun, strict=True):
            for (q, m), time in zip(order, times, strict=True):
                starts[q * count + m] = time
        return Listed(max(end[-1] for end in ended if end), starts, orders)

    def named(self) -> Iterator[tuple[ScheduleName, Listed]]:
        """Named schedules of this placement that meet the caps, with backward passes split where that is free."""
        for name in ScheduleName:
            if self._free and name is ScheduleName.ONE_F_ONE_B:
                continue  # With backward passes split, it is another's.
            if not self._free and (name in SPLITS_BACKWARD) is not self._split:
                continue
            try:
                schedule = named_schedule(
                    name, len(self._caps), self._micro_batches, len(self._placement) // len(self._caps)
                )
            except StrategyError:
                continue
            if schedule.placement != self._placement:
                continue
            orders = encode(schedule)
            if self._free:
                orders = [self._halved(order) for order in orders]
            if all(
                peak(order, self._costs) <= cap * (1 + 1e-9)
                for order, cap in zip(orders, self._caps, strict=True)
            ):
                yield name, self._run(orders)

    def _halved(self, order: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """With each whole backward pass as its two halves, one after the other: it takes no longer, and others wait
        for the first half only."""
        stages = self._costs.stages
        halves: list[tuple[int, int]] = []
        for q, m in order:
            if q // stages == BACKWARD:
                halves += [(q + stages, m), (q + 2 * stages, m)]
            else:
                halves.append((q, m))
        return halves

    def schedule(self, built: Listed) -> Schedule:
        """As a schedule of all stages."""
        orders = built.orders
        if self._merges:
            merged, stages = self._costs.stages, len(self._whole_placement)
            orders = [
                [
                    (q // merged * stages + stage, m)
                    for q, m in order
                    for stage in self._stages_of(q % merged, forwards=q // merged == FORWARD)
                ]
                for order in orders
            ]
        return decode("auto", self._whole_placement, orders, self._micro_batches)

    def _stages_of(self, merged: int, *, forwards: bool) -> Sequence[int]:
        own = range(merged * self._parts, (merged + 1) * self._parts)
        return own if forwards else own[::-1]


def variants(costs: Costs, ranks: int, micro_batches: int, caps: Sequence[float]) -> list[Variant]:
    """Variants whose caps hold a micro-batch on each rank. Raises StrategyError when there is none."""
    halves = zip(costs.backward, costs.input, costs.weight, strict=True)
    free = all(i + w <= b * (1 + 1e-12) for b, i, w in halves) and min(costs.released) >= 0
    found, lacking = [], ""
    for name, placement in _placements(costs.stages, ranks):
        for split in (True,) if free else (True, False):
            variant = Variant(name, placement, costs, micro_batches, caps, split=split, free=free)
            if short := variant.lacking():
                lacking = lacking or short
            else:
                found.append(variant)
    if not found:
        raise StrategyError(f"auto schedule: {lacking}")
    return found


def _placements(stages: int, ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    parts = stages // ranks
    yield "plain", tuple(s // parts for s in range(stages))
    if parts > 1 and ranks > 1:
        yield "interleaved", tuple(s % ranks for s in range(stages))
        yield "V", (v_placement(ranks) * parts)[:stages]
