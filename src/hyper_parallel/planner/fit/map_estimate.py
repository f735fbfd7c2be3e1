"""Maximum a posteriori fit of the cost model's constants.

    minimise  Σ_groups 4 · mean of ρ((log estimate − log measured) / σ)  +  Σ_constants ρ(x / spread)

over x, the logarithm of each constant by its prior; the mean is over a group's rows. A group is a source on one kind
of hardware, and each weighs the same, whatever its number of rows: as four independent measurements. σ is 10%. ρ
grows linearly beyond three σ (ρ(z) = 2 δ² (√(1 + (z/δ)²) − 1), δ = 3), so that a run which was slow for reasons of
its own does not decide. The priors keep what the runs do not determine where it was. Solved by Levenberg and
Marquardt's method with that weight (Moré, *The Levenberg-Marquardt algorithm*, 1978; reweighting as in Holland and
Welsch, 1977).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import seconds_by_kind
from hyper_parallel.planner.table import Array, Table, sum_of

SIGMA = 0.1
WEIGHT = 4.0
ROBUST = 3.0

PRIORS = Constants()

FITTED = [one for one in fields(Constants) if one.metadata.get("spread")]
"""The constants that times determine."""


def solve(table: Table, seconds: Array, groups: Sequence[str]) -> Constants:
    """The constants that explain best what was measured. `groups` names the group of each row."""
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    measured = np.log(seconds)
    spread = np.array([one.metadata["spread"] for one in FITTED])

    def residuals(x: Array) -> Array:
        estimate = sum_of(seconds_by_kind(table, _constants(x)))
        return np.concatenate([(np.log(estimate) - measured) / SIGMA, x / spread])

    weights = np.concatenate([WEIGHT / counts[index], np.ones(len(FITTED))])
    return _constants(_least(residuals, weights, len(FITTED)))


def _constants(x: Array) -> Constants:
    priors = {one.name: getattr(PRIORS, one.name) for one in FITTED}
    return Constants.of(
        {name: prior * float(np.exp(step)) for (name, prior), step in zip(priors.items(), x, strict=True)}
    )


def _least(residuals: Callable[[Array], Array], weights: Array, n: int, rounds: int = 60) -> Array:
    """The argument of [n] that minimises the weighted robust sum of squares, from 0."""
    x = np.zeros(n)
    now = residuals(x)
    cost, damping = _cost(now, weights), 1e-2
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(n)], axis=1)
        robust = weights / np.sqrt(1 + (now / ROBUST) ** 2)
        normal = jacobian.T @ (robust[:, None] * jacobian)
        downhill = -jacobian.T @ (robust * now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            there = residuals(x + np.clip(step, -0.7, 0.7))
            if _cost(there, weights) < cost:
                break
            damping *= 4
        else:
            break
        gained = (cost - _cost(there, weights)) / cost
        x, now, cost = x + np.clip(step, -0.7, 0.7), there, _cost(there, weights)
        damping = max(damping / 4, 1e-6)
        if gained < 1e-6:
            break
    return x


def _cost(residuals: Array, weights: Array) -> float:
    return float(np.sum(weights * 2 * ROBUST**2 * (np.sqrt(1 + (residuals / ROBUST) ** 2) - 1)))
