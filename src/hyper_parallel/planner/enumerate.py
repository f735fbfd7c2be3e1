"""Exhaustive enumeration of small strategy spaces: the oracle of the search.

The search tells one strategy for each set of degrees, which is what a person wants to compare. Who is to choose by
closer looks, as `strategy: auto` does, also wants those that differ in what they split or in which axis shares weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer
from hyper_parallel.planner.space import StrategySpace
from hyper_parallel.planner.table import SPREAD, Table

MOST = 20_000
"""Points that are listed; of larger spaces the search tells the best."""
CHUNK = 256
"""Rows whose figures are made at once: who looks at the best few takes no time over the others."""


def ranked(question: Question, constants: Constants) -> Iterator[Figures]:
    """The strategies that fit, best estimate first: all of a small space, else `question.top` of the search's.

    None are where nothing fits. Raises ConfigError where no strategy is legal.
    """
    space = StrategySpace(question)
    rows = space.degrees()
    for level in (space.micro, space.dual):
        rows, _ = level.expand(rows)
    if not rows["micro"].size or int(space.counts(rows).sum()) > MOST:
        for choice in answer(question, constants).best:
            yield figures(choice.table, choice.estimate)[0]
        return
    for level in (space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    base = Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))
    table = Table.stacked(
        [base.replaced(**{name: ways[name] for name in SPREAD}) for ways in space.kept(rows)]
    )
    found = estimate(table, constants)
    fits = np.flatnonzero(np.broadcast_to(found.fits, table.n))
    seconds, peak = (np.broadcast_to(column, table.n)[fits] for column in (found.seconds, found.peak))
    order = fits[np.lexsort((peak, seconds))]
    for start in range(0, order.size, CHUNK):
        some = table.take(order[start : start + CHUNK])
        yield from figures(some, estimate(some, constants))
