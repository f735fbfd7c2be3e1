"""A schedule for given, unequal costs and memory: list scheduling with several priority rules and placements.

Candidates, of which the shortest wins:

- **list schedules** (`list_scheduling`) of each placement that the stages allow (neighbouring stages on one rank,
  interleaved, and the V), built from both ends, with the rules of `lanes.RULES`, then rebuilt from the other end with
  their own times as priorities;
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
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.lanes import RULES, Lane, Rule, lanes
from hyper_parallel.schedule.list_scheduling import Listed
from hyper_parallel.schedule.names import ScheduleName
from hyper_parallel.schedule.schedule import Schedule

EFFORT = 32_000
"""Actions placed: ten list schedules of 16 stages and 64 micro-batches."""
_NEAR = 1e-6
"""Relative distance to the lower bound at which the search ends."""
_SHAKES = (0.5, 1.0, 2.0, 8.0)
"""Random shifts of priorities, in average actions."""
_PATIENCE = (0.0, 0.3, 1.0)
"""In turn with the shakes; of `list_schedule`."""
_NEARBY = 0.05
"""Lanes whose shortest schedule is longer by less than this are searched too."""


@dataclass(frozen=True)
class AutoSchedule:
    """What the search found."""

    schedule: Schedule
    makespan: float
    bound: float
    """No schedule of the placements that were considered takes less."""
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
    rank's cap is below one micro-batch of its own stages.
    """
    if ranks < 1 or micro_batches < 1 or costs.stages % ranks:
        raise StrategyError(
            f"auto schedule: {costs.stages} stages and {micro_batches} micro-batches on {ranks} ranks; there must be "
            "at least 1 of each, and as many stages on each rank. Cut the model into a multiple of the ranks"
        )
    limits = [math.inf] * ranks if caps is None else [float(cap) for cap in caps]
    if len(limits) != ranks:
        raise StrategyError(
            f"auto schedule: {len(limits)} caps were given for {ranks} ranks; give one for each"
        )
    search = _Search(lanes(costs, ranks, micro_batches, limits), effort)
    search.run()
    return search.found()


class _Search:
    """Keeps the best candidate."""

    def __init__(self, candidates: Sequence[Lane], effort: int) -> None:
        self._lanes = candidates
        self._effort = effort
        self._bound = min(lane.bound for lane in candidates)
        self._makespan = math.inf
        self._best: tuple[str, Lane, Listed] | None = None
        self._named: dict[ScheduleName, float] = {}

    def run(self) -> None:
        """Try all candidates, or as many as it takes to reach the bound."""
        for rule in RULES:
            for lane in self._lanes:
                if not self._done() and (self._effort > 0 or not lane.tried):
                    self._from_rule(lane, rule)
        if not self._done():
            for lane in self._lanes:
                self._from_named(lane)
        self._shaken()

    def found(self) -> AutoSchedule:
        """The best candidate."""
        assert self._best is not None
        source, lane, built = self._best
        return AutoSchedule(lane.schedule(built), self._makespan, self._bound, source, self._named)

    def _done(self) -> bool:
        return self._makespan <= self._bound * (1 + _NEAR)

    def _offer(self, source: str, lane: Lane, built: Listed) -> None:
        """Keep a candidate if it is the shortest. `built` runs forwards and has the times of its orders."""
        if built.makespan < self._makespan * (1 - 1e-12):
            self._makespan, self._best = built.makespan, (source, lane, built)

    def _from_rule(self, lane: Lane, rule: Rule) -> None:
        built = lane.place(rule.backwards, lane.priorities(rule), rule.patience)
        self._rebuild(lane, rule.backwards, built, f"{lane.name}: {rule.name}")

    def _rebuild(self, lane: Lane, backwards: bool, built: Listed, source: str, turns: int = 2) -> None:
        """Offer a list schedule, and build it anew from the other end with its own times as priorities."""
        for turn in range(turns + 1):
            self._effort -= lane.actions
            lane.keep(backwards, built)
            if built.makespan < self._makespan * (1 - 1e-12):
                self._offer(source, lane, lane.timed(backwards, built))
            if turn == turns or self._done() or self._effort < lane.actions:
                return
            priorities = lane.rebuilding(backwards, built)
            backwards = not backwards
            built = lane.place(backwards, priorities)

    def _from_named(self, lane: Lane) -> None:
        for name, built in lane.named():
            self._named[name] = min(built.makespan, self._named.get(name, math.inf))
            lane.keep(False, built)
            self._offer(name, lane, built)

    def _shaken(self) -> None:
        """Spend what is left of the effort near the best schedule."""
        draw = random.Random(0)
        turn = 0
        while not self._done():
            near = sorted(self._lanes, key=lambda lane: lane.shortest)
            near = [lane for lane in near if lane.shortest <= near[0].shortest * (1 + _NEARBY)]
            # Four turns for the best lane, then four for one of those nearby.
            lane = near[turn // 4 % len(near)] if turn % 8 >= 4 else near[0]
            if self._effort < lane.actions:
                return
            backwards, built = lane.best
            priorities = lane.rebuilding(backwards, built)
            if turn:
                shake = _SHAKES[turn % len(_SHAKES)] * lane.average
                priorities = [p + shake * draw.random() for p in priorities]
            built = lane.place(not backwards, priorities, _PATIENCE[turn % len(_PATIENCE)])
            self._rebuild(lane, not backwards, built, f"{lane.name}: shaken", turns=1)
            turn += 1
