"""Exhaustive enumeration of small strategy spaces: the oracle of the search.

The search tells one strategy for each set of degrees, which is what a person wants to compare. Who is to choose by
closer looks, as `strategy: auto` does, also wants those that differ in what they split or in which axis shares weights.
Of the numbers of layers that may be recomputed, none, the fewest that fit, and all are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hyper_parallel.planner.columns import Columns, taken
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.memory_choices import MemoryChoice
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer
from hyper_parallel.planner.space import FULL, StrategySpace
from hyper_parallel.planner.table import SPREAD, Table

MOST = 20_000
"""Points that are listed; of larger spaces the search tells the best."""
CHUNK = 256
"""Rows whose figures are made at once: who looks at the best few takes no time over the others."""


def ranked(question: Question, constants: Constants) -> Iterator[Figures]:
    """The strategies that fit, best estimate first: all of a small space, else `question.top` of the search's.

    None are where nothing fits. Raises ConfigError where no strategy is legal.
    """
    space, few = StrategySpace(question), _of_whole_layers(question)
    rows = space.degrees()
    for level in (space.micro, space.dual):
        rows, _ = level.expand(rows)
    if not rows["micro"].size or int(few.counts(rows).sum()) > MOST:
        for choice in answer(question, constants).best:
            yield figures(choice.table, choice.estimate)[0]
        return
    for level in (space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    base = Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))
    listed = list(few.kept(rows))
    if (FULL, None) in space.again:
        listed.append(_fewest_layers(space, rows, base, constants))
    table = Table.stacked([base.replaced(**{name: ways[name] for name in SPREAD}) for ways in listed])
    found = estimate(table, constants)
    fits = np.flatnonzero(np.broadcast_to(found.fits, table.n))
    seconds, peak = (np.broadcast_to(column, table.n)[fits] for column in (found.seconds, found.peak))
    order = fits[np.lexsort((peak, seconds))]
    for start in range(0, order.size, CHUNK):
        some = table.take(order[start : start + CHUNK])
        yield from figures(some, estimate(some, constants))


def _of_whole_layers(question: Question) -> StrategySpace:
    """The space in which all layers are recomputed or none, unless the question says how many are."""
    if "recomputed" in question.fix:
        return StrategySpace(question)
    return StrategySpace(replace(question, fix={**question.fix, "recomputed": 1.0}))


def _fewest_layers(space: StrategySpace, rows: Columns, base: Table, constants: Constants) -> Columns:
    """Of each row that fits only with recomputation, the way with the fewest recomputed layers that does."""
    n = rows["micro"].size
    best = MemoryChoice(space, base, constants).fastest(rows, np.zeros(n), np.full(n, np.inf)).rows
    return taken(best, (best["recompute"] == FULL) & (best["recomputed"] < 1))
