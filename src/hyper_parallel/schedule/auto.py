"""A schedule for given, unequal costs and memory: list scheduling with several priority rules and placements.

Candidates, of which the shortest wins:

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
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.list_scheduling import Listed
from hyper_parallel.schedule.schedule import Schedule
from hyper_parallel.schedule.variants import RULES, Rule, Variant, variants
from hyper_parallel.strategy.schedule_name import ScheduleName

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
    """What the search found."""

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
    rank's cap is below one micro-batch of its own stages.
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
