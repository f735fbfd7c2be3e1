"""A schedule for given, unequal costs and memory: list scheduling with several priority rules and placements.

Candidates; the shortest wins:

- **list schedules** (`list_scheduling`) of each placement that the stages allow (neighbouring stages on one rank,
  interleaved, and the V), built from both ends with the rules of `variants.RULES`, then rebuilt from the other end
  with their own times as priorities;
- **named schedules** that meet the caps, so that none of them is shorter than the answer;
- as far as the effort lasts, list schedules with the best one's times as priorities, shaken at random.

The search ends early at the lower bound. It depends on its arguments alone, so that ranks with the same arguments have
the same schedule: effort is counted in actions placed, not in seconds. A backward pass is split wherever the halves
together take no longer; where they do (layer recomputation), schedules with whole and with split backward passes both
are candidates, at their own prices. Splitting frees no memory unless `Costs.released` says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Schedule
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.declared_pipeline import SPLITS_BACKWARD, named_schedule
from hyper_parallel.schedule.list_scheduling import Listed, Problem, ends_first, list_schedule, mirrored
from hyper_parallel.schedule.lower_bound import makespan_bound
from hyper_parallel.schedule.timing import BACKWARD, FORWARD, INPUT, WEIGHT, decode, encode, peak, run_orders
from hyper_parallel.schedule.v_shaped import v_placement
from hyper_parallel.strategy.pipeline import ScheduleName

EFFORT = 32_000
"""Actions placed: ten list schedules of 16 stages and 64 micro-batches."""
_NEAR = 1e-6
"""Relative distance to the lower bound at which the search ends."""
_SHAKES = (0.5, 1.0, 2.0, 8.0)
"""Random shifts of priorities, in average actions."""
_PATIENCE = (0.0, 0.3, 1.0)
"""In turn with the shakes; of `list_schedule`."""
_NEARBY = 0.05
"""Variants whose shortest schedule is longer by less than this are searched too."""


@dataclass(frozen=True)
class AutoSchedule:
    """The result of the search."""

    schedule: Schedule
    makespan: float
    bound: float
    """No schedule of the placements that were considered takes less; neighbouring stages of one rank run as one."""
    source: str
    """The candidate that won: a named schedule, or a placement and rule of list scheduling."""
    named: dict[ScheduleName, float]
    """Makespans of named schedules that meet the caps, with backward passes split where that is free; none where list
    scheduling reached the bound before."""


def auto_schedule(
    costs: Costs,
    ranks: int,
    micro_batches: int,
    caps: Sequence[float] | None = None,
    *,
    effort: int = EFFORT,
) -> AutoSchedule:
    """A short schedule of `costs.stages` stages, a multiple of `ranks`.

    `caps`: most that each rank may hold of what forward passes save, in the unit of `Costs.saved` (micro-batches of a
    stage where that was left out); no limit when left out. Raises StrategyError for sizes that do not fit, and where a
    rank's cap is below one micro-batch of its stages.
    """
    if ranks < 1 or micro_batches < 1 or costs.stages % ranks:
        raise StrategyError(
            f"auto schedule: {costs.stages} stages and {micro_batches} micro-batches on {ranks} ranks; there must be "
            "at least 1 of each, and as many stages on each rank. Cut the model into a multiple of the ranks"
        )
    limits = [math.inf] * ranks if caps is None else [float(cap) for cap in caps]
    if len(limits) != ranks or any(math.isnan(limit) for limit in limits):
        raise StrategyError(
            f"auto schedule: the caps {limits} were given for {ranks} ranks; give each a number, infinite for no limit"
        )
    search = _Search(variants(costs, ranks, micro_batches, limits), effort)
    search.run()
    return search.found()


class _Search:
    """Keeps the best candidate."""

    def __init__(self, candidates: Sequence[Variant], effort: int) -> None:
        self._variants = candidates
        self._effort = effort
        self._bound = min(variant.bound for variant in candidates)
        self._makespan = math.inf
        self._best: tuple[str, Variant, Listed] | None = None
        self._named: dict[ScheduleName, float] = {}

    def run(self) -> None:
        """Try all candidates, or as many as it takes to reach the bound."""
        for rule in RULES:
            for variant in self._variants:
                if not self._done() and (self._effort > 0 or not variant.tried):
                    self._from_rule(variant, rule)
        if not self._done():
            for variant in self._variants:
                self._from_named(variant)
        self._shaken()

    def found(self) -> AutoSchedule:
        """The best candidate."""
        assert self._best is not None
        source, variant, built = self._best
        return AutoSchedule(variant.schedule(built), self._makespan, self._bound, source, self._named)

    def _done(self) -> bool:
        return self._makespan <= self._bound * (1 + _NEAR)

    def _offer(self, source: str, variant: Variant, built: Listed) -> None:
        """Keep a candidate if it is the shortest. `built` runs forwards and has the times of its orders."""
        if built.makespan < self._makespan * (1 - 1e-12):
            self._makespan, self._best = built.makespan, (source, variant, built)

    def _from_rule(self, variant: Variant, rule: Rule) -> None:
        built = variant.place(rule.backwards, variant.priorities(rule), rule.patience)
        self._rebuild(variant, rule.backwards, built, f"{variant.name}: {rule.name}")

    def _rebuild(self, variant: Variant, backwards: bool, built: Listed, source: str, turns: int = 2) -> None:
        """Offer a list schedule, and build it anew from the other end with its own times as priorities."""
        for turn in range(turns + 1):
            self._effort -= variant.actions
            variant.keep(backwards, built)
            if built.makespan < self._makespan * (1 - 1e-12):
                self._offer(source, variant, variant.timed(backwards, built))
            if turn == turns or self._done() or self._effort < variant.actions:
                return
            priorities = variant.rebuilding(backwards, built)
            backwards = not backwards
            built = variant.place(backwards, priorities)

    def _from_named(self, variant: Variant) -> None:
        for name, built in variant.named():
            self._named[name] = min(built.makespan, self._named.get(name, math.inf))
            variant.keep(False, built)
            self._offer(name, variant, built)

    def _shaken(self) -> None:
        """Spend what is left of the effort near the best schedule."""
        draw = random.Random(0)
        turn = 0
        while not self._done():
            near = sorted(self._variants, key=lambda variant: variant.shortest)
            near = [variant for variant in near if variant.shortest <= near[0].shortest * (1 + _NEARBY)]
            # Four turns for the best variant, then four for one of those nearby.
            variant = near[turn // 4 % len(near)] if turn % 8 >= 4 else near[0]
            if self._effort < variant.actions:
                return
            backwards, built = variant.best
            priorities = variant.rebuilding(backwards, built)
            if turn:
                shake = _SHAKES[turn % len(_SHAKES)] * variant.average
                priorities = [p + shake * draw.random() for p in priorities]
            built = variant.place(not backwards, priorities, _PATIENCE[turn % len(_PATIENCE)])
            self._rebuild(variant, not backwards, built, f"{variant.name}: shaken", turns=1)
            turn += 1


@dataclass(frozen=True)
class Rule:
    """The kind of action that goes first where several could start; those of one kind by their earliest times."""

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
