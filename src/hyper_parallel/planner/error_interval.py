"""Error interval of an estimate: covers 90% of measured runs of its kind.

    r = log(estimate / measured) / w        seconds in [s₁ · exp(−w r₉₅), s₀ · exp(−w r₅)]        `between`

w is by how much the interval is wider where few published runs are of the question's kind, or none
(`runs_of_kind.widening`); in most questions it is 1. r₅ and r₉₅ are quantiles of the residuals of published runs, each
of a source that was held out while constants were fitted (`fit.judge`) and that does not count for w, each source on
one kind of hardware weighing the same. They are written beside the constants, for models with experts and without
(`KINDS`), since the former are harder to estimate. What open facts explain of a run is no residual.

s₀ and s₁ are the estimate with every fact that the framework leaves open against it, and for it
(`cost_model.step.open_facts`). Both are the estimate where nothing is open.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from hyper_parallel.planner.constants import FITTED
from hyper_parallel.planner.cost_model.step import Estimate
from hyper_parallel.planner.runs_of_kind import widening
from hyper_parallel.planner.table import Array, Table

LOW, HIGH = 0.05, 0.95
KINDS = ("dense", "mixture")
"""Models without experts, and with."""


@cache
def residuals() -> dict[str, tuple[float, float]]:
    """r₅ and r₉₅ by kind."""
    found = json.loads(FITTED.read_text())["residuals"]
    return {kind: (float(found[kind]["low"]), float(found[kind]["high"])) for kind in KINDS}


def between(t: Table, told: Estimate) -> tuple[Array, Array]:
    """Seconds that nine of ten steps with such estimates take at least and at most."""
    found = residuals()
    low, high = (np.where(t.experts > 0, found["mixture"][i], found["dense"][i]) for i in (0, 1))
    wider = widening(t)
    return told.fastest * np.exp(-high * wider), told.slowest * np.exp(-low * wider)


def quantiles(residuals: Array, weights: Array) -> tuple[float, float]:
    """The weighted quantiles LOW and HIGH."""
    order = np.argsort(residuals)
    sums = np.cumsum(weights[order])
    places = np.searchsorted(sums, np.array([LOW, HIGH]) * sums[-1])
    low, high = residuals[order][np.minimum(places, residuals.size - 1)]
    return float(low), float(high)
