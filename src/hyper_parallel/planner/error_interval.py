"""Error interval of an estimate: covers 90% of measured runs.

    r = log(estimate / measured)        seconds in [s · exp(−r₉₅), s · exp(−r₅)]          `between`

r₅ and r₉₅ are quantiles of the residuals of published runs, each of a source that was held out while constants were
fitted (`fit.judge`), each source on one kind of hardware weighing the same. They are written beside the constants.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from hyper_parallel.planner.constants import FITTED
from hyper_parallel.planner.table import Array

LOW, HIGH = 0.05, 0.95


@cache
def residuals() -> tuple[float, float]:
    """r₅ and r₉₅."""
    found = json.loads(FITTED.read_text())["residuals"]
    return float(found["low"]), float(found["high"])


def between(seconds: Array) -> tuple[Array, Array]:
    """Seconds that nine of ten steps with such an estimate take at least and at most."""
    low, high = residuals()
    return seconds * np.exp(-high), seconds * np.exp(-low)


def quantiles(residuals: Array, weights: Array) -> tuple[float, float]:
    """The weighted quantiles LOW and HIGH."""
    order = np.argsort(residuals)
    sums = np.cumsum(weights[order])
    places = np.searchsorted(sums, np.array([LOW, HIGH]) * sums[-1])
    low, high = residuals[order][np.minimum(places, residuals.size - 1)]
    return float(low), float(high)
