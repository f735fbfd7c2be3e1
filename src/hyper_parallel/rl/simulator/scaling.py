"""Role times as functions of the number of devices: fixed + work / n, fitted to what was measured.

The least-squares fit of T(n) = F + W / n is a line in 1 / n. Where it has a negative slope or intercept, that part is
0 and the other one fitted alone (`fit`).

For generation, measured are the times in which n devices generate all answers of a step, started at once. With m_j the
longest and t_j all tokens of engine j, whose passes take p + k s seconds for k running answers, that time is

    T(n) = max over engines j of (p m_j + s t_j)        `generation_law`

A step's lengths are drawn, so that m and t of the engine that ends last are known for given p and s; least squares
over the measured n then give p and s, and so on until they stay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from statistics import NormalDist

from hyper_parallel.config.rl_simulation import Lengths, RlSimulation, RoleTime
from hyper_parallel.errors import ConfigError

_DRAWN_STEPS, _ROUNDS = 4, 12


def fit(measured: Mapping[int, float]) -> tuple[float, float]:
    """(F, W) of seconds by number of devices; at least two numbers."""
    points = [(1 / devices, seconds) for devices, seconds in measured.items()]
    x, y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    if slope <= 0:
        return y, 0.0
    if y - slope * x < 0:
        return 0.0, sum(a * b for a, b in points) / sum(a * a for a, _ in points)
    return y - slope * x, slope


def seconds_on(time: RoleTime, devices: int, name: str) -> float:
    """Seconds of a role for a step on `devices`. Raises ConfigError if a single measurement is of another number."""
    if devices in time.measured:
        return time.measured[devices]
    if len(time.measured) == 1:
        (known,) = time.measured
        raise ConfigError(
            f"simulation.{name}.measured: has {known} devices only, and {devices} are simulated; measure a second "
            f"number of devices, or give fixed and work"
        )
    fixed, work = fit(time.measured) if time.measured else (time.fixed, time.work)
    return fixed + work / devices


def generation_law(setup: RlSimulation) -> tuple[float, float]:
    """(`pass_seconds`, `sequence_seconds`), as given or fitted."""
    given = setup.generation
    if not given.measured:
        return given.pass_seconds, given.sequence_seconds
    source = random.Random(setup.seed)
    steps = [
        [draw_length(setup.lengths, source) for _ in range(setup.groups * setup.group)]
        for _ in range(_DRAWN_STEPS)
    ]
    loads = {devices: [_loads(step, devices // given.engine) for step in steps] for devices in given.measured}
    law = (1.0, 0.0)
    for _ in range(_ROUNDS):
        rows = list[tuple[float, float, float]]()
        for devices, seconds in given.measured.items():
            last = [
                max(step, key=lambda load: law[0] * load[0] + law[1] * load[1]) for step in loads[devices]
            ]
            longest, tokens = (sum(load[i] for load in last) / len(last) for i in (0, 1))
            rows.append((longest, tokens, seconds))
        law = least_squares(rows)
    return law


def _loads(step: list[int], engines: int) -> list[tuple[float, float]]:
    """(longest, all tokens) of each engine, answers dealt out one by one."""
    dealt = [step[engine::engines] for engine in range(engines)]
    return [(float(max(one)), float(sum(one))) for one in dealt if one]


def least_squares(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(p, s) for which p m + s t is nearest to each third value; neither is negative."""
    mm, mt, tt = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    my, ty = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    det = mm * tt - mt * mt
    p, s = ((my * tt - ty * mt) / det, (ty * mm - my * mt) / det) if det else (-1.0, -1.0)
    if p >= 0 and s >= 0:
        return p, s
    only_p, only_s = (my / mm, 0.0), (0.0, ty / tt)
    return min(only_p, only_s, key=lambda law: sum((law[0] * m + law[1] * t - y) ** 2 for m, t, y in rows))


# Lengths of answers: a distribution cut at a limit, and its mean.
#
# For a log-normal X with mean m and standard deviation σ of ln X, μ = ln m - σ² / 2, and with the limit L
#
#     E min(X, L) = m Φ((ln L - μ - σ²) / σ) + L (1 - Φ((ln L - μ) / σ))        `mean_length`


def draw_length(lengths: Lengths, source: random.Random) -> int:
    """The tokens of one answer."""
    if lengths.distribution == "observed":
        return min(lengths.longest, source.choice(lengths.observed))
    value = lengths.mean
    if lengths.distribution == "lognormal":
        value = source.lognormvariate(_mu(lengths), lengths.sigma)
    return min(lengths.longest, max(1, round(value)))


def mean_length(lengths: Lengths) -> float:
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
