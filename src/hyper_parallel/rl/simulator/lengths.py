"""Lengths of answers: a distribution cut at a limit, and its mean.

For a log-normal X with mean m and standard deviation σ of ln X, μ = ln m - σ² / 2, and with the limit L

    E min(X, L) = m Φ((ln L - μ - σ²) / σ) + L (1 - Φ((ln L - μ) / σ))        `mean`
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist

from hyper_parallel.config.rl_simulation import Lengths


def draw(lengths: Lengths, source: random.Random) -> int:
    """The tokens of one answer."""
    if lengths.distribution == "observed":
        return min(lengths.longest, source.choice(lengths.observed))
    value = lengths.mean
    if lengths.distribution == "lognormal":
        value = source.lognormvariate(_mu(lengths), lengths.sigma)
    return min(lengths.longest, max(1, round(value)))


def mean(lengths: Lengths) -> float:
    """The expected tokens of an answer, after the cut."""
    if lengths.distribution == "observed":
        return sum(min(lengths.longest, one) for one in lengths.observed) / len(lengths.observed)
    if lengths.distribution == "constant":
        return min(float(lengths.longest), lengths.mean)
    normal, mu, sigma = NormalDist(), _mu(lengths), lengths.sigma
    cut = math.log(lengths.longest)
    below = lengths.mean * normal.cdf((cut - mu - sigma**2) / sigma)
    return below + lengths.longest * (1 - normal.cdf((cut - mu) / sigma))


def _mu(lengths: Lengths) -> float:
    return math.log(lengths.mean) - lengths.sigma**2 / 2
