"""Fit of the planner's constants, and its cross-validation: estimates for sources that the fit has not seen.

Each source is held out whole, constants are fitted on the others (`solve`), and its rows are estimated with them. So a
cell (`residuals`: source, kind of model, hardware) is judged by constants that have seen neither it nor its source's
other cells, whose framework, authors and cluster are often the same. Every cell weighs the same:

| figure | what |
|---|---|
| `error`, `median`, `bias` | mean and median of abs(estimate / measured − 1), and the median with its sign |
| `held` | of the rows, those within their 90% interval, of the residuals of other sources' cells |
| `unseen` | `error` by constants that have seen no row of its kind of model on its generation of devices |

Of the rows that are not transcribed by hand, every (source, hardware) weighs the same:

| figure | what |
|---|---|
| `groups` | `error` and `median`; `null`: the former of one constant share of the peak, fitted in the same way |
| `memory` | `error` of the peak of memory |
| `ordered` | of pairs of one model on one cluster whose tokens/s are more than 15% apart, those in the right order |
| `picked` | of the sets of such rows, those in which the row estimated to be best is within 10% of the best |
| `ordered_alike`, `picked_alike` | the same for rows of one batch and length only, which are harder to tell apart |
| `caught`, `alarms` | of the rows that failed, those called unfit; of those that ran, those called unfit |
| `kinds` | for models with experts and without: rows, mean over groups of `error` and of `median` |

Rows of an interactive figure whose repeats differ by 5–25% count by their upper envelope: what reaches `ENVELOPE` of
the peak in model FLOPs. Rows that look computed (`Evidence.computed`) are judged and not fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fit_constants.published_runs import Evidence
from fit_constants.residuals import Residuals, cells_of, collected
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import fits, memory
from hyper_parallel.planner.cost_model.step import open_facts, seconds_by_kind
from hyper_parallel.planner.error_interval import KINDS, Runs, kinds
from hyper_parallel.planner.metrics import flops_per_token, peak
from hyper_parallel.planner.table import Array, Table, sum_of

APART = 1.15
NEAR = 0.90


@dataclass(frozen=True)
class Judgement:
    """What `judge` found; see the module's tables."""

    cells: dict[str, dict[str, float]]
    groups: dict[str, dict[str, float]]
    kinds: dict[str, dict[str, float]]
    memory: dict[str, float]
    ordered: tuple[int, int]
    picked: tuple[int, int]
    ordered_alike: tuple[int, int]
    picked_alike: tuple[int, int]
    caught: tuple[int, int]
    alarms: tuple[int, int]
    estimate: Array
    """Seconds of each row, its source held out."""
    residuals: Residuals
    runs: list[Runs]
    """What is published, by source and kind."""
    constants: Constants
    """Fitted on all sources."""


def judge(evidence: Evidence) -> Judgement:
    """Hold each source out in turn, then each kind of model on each generation of devices."""
    timed = evidence.timed
    whole = _solved(evidence, evidence.fitted)
    estimate, null, fastest, slowest = (np.full(timed.size, np.nan) for _ in range(4))
    for source in np.unique(evidence.sources[timed]):
        own = timed & (evidence.sources == source)
        rest = evidence.fitted & ~own
        constants = whole if rest.sum() == evidence.fitted.sum() else _solved(evidence, rest)
        table = evidence.table.take(own)
        estimate[own] = seconds_of(table, constants)
        fastest[own], slowest[own] = open_facts(table, constants, estimate[own])
        null[own] = _null(evidence, rest, own)
    known = collected(evidence.table.take(timed), evidence.sources[timed])
    residuals = Residuals.of(evidence, (fastest, slowest), known)
    held = np.zeros(timed.size, bool)
    held[timed] = residuals.held
    # The older figures are of rows that constants may be fitted on.
    asked = replace(evidence, timed=timed & ~evidence.transcribed)
    return Judgement(
        cells=_by_cell(evidence, estimate, held, _unseen(evidence, whole)),
        groups=_by_group(asked, estimate, null),
        kinds=_kinds(asked, estimate),
        memory=_memory(asked),
        **choices(asked, estimate, alike=False),
        **choices(asked, estimate, alike=True),
        **_unfit(asked),
        estimate=estimate,
        residuals=residuals,
        runs=known,
        constants=whole,
    )


def _solved(evidence: Evidence, rows: NDArray[np.bool_]) -> Constants:
    return solve(evidence.table.take(rows), evidence.seconds[rows], evidence.groups[rows].tolist())


def _unseen(evidence: Evidence, whole: Constants) -> Array:
    """Seconds of each row by constants that have seen no row of its kind of model on its generation of devices."""
    models, devices, _ = kinds(evidence.table)
    estimate = np.full(evidence.timed.size, np.nan)
    for model, device in sorted(set(zip(models[evidence.timed], devices[evidence.timed], strict=True))):
        alike = (models == model) & (devices == device)
        rest = evidence.fitted & ~alike
        constants = whole if rest.sum() == evidence.fitted.sum() else _solved(evidence, rest)
        own = evidence.timed & alike
        estimate[own] = seconds_of(evidence.table.take(own), constants)
    return estimate


def _by_cell(
    evidence: Evidence, estimate: Array, held: NDArray[np.bool_], unseen: Array
) -> dict[str, dict[str, float]]:
    cells, seconds = cells_of(evidence), evidence.seconds
    peak = np.broadcast_to(sum_of(memory(evidence.table)), evidence.table.n) / evidence.peak
    mixture = np.broadcast_to(evidence.table.experts > 0, evidence.timed.size)
    found = {}
    for name in np.unique(cells[evidence.timed]):
        own = evidence.timed & (cells == name)
        errors = _errors(estimate[own], seconds[own])
        found[str(name)] = {
            "rows": int(own.sum()),
            "bias": float(np.median(estimate[own] / seconds[own])) - 1,
            "error": float(errors.mean()),
            "median": float(np.median(errors)),
            "held": float(held[own].mean()),
            "unseen": _error(unseen[own], seconds[own]),
            "mixture": bool(mixture[own].any()),
            "transcribed": bool(evidence.transcribed[own].any()),
        }
        if evidence.transcribed[own].any() and np.isfinite(peak[own]).any():
            found[str(name)]["memory"] = float(np.nanmean(np.abs(peak[own] - 1)))
    return found


def _by_group(evidence: Evidence, estimate: Array, null: Array) -> dict[str, dict[str, float]]:
    found = {}
    for name in np.unique(evidence.groups[evidence.timed]):
        own = evidence.timed & (evidence.groups == name)
        errors = _errors(estimate[own], evidence.seconds[own])
        found[str(name)] = {
            "rows": int(own.sum()),
            "error": float(errors.mean()),
            "median": float(np.median(errors)),
            "null": _error(null[own], evidence.seconds[own]),
        }
    return found


def seconds_of(table: Table, constants: Constants) -> Array:
    """Seconds of a step of each row."""
    return np.broadcast_to(sum_of(seconds_by_kind(table, constants)), table.n)


def _errors(estimate: Array, measured: Array) -> Array:
    return np.abs(estimate / measured - 1)


def _error(estimate: Array, measured: Array) -> float:
    return float(_errors(estimate, measured).mean())


def _weights(groups: NDArray[np.str_]) -> Array:
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return 1.0 / counts[index]


def _null(evidence: Evidence, rest: NDArray[np.bool_], own: NDArray[np.bool_]) -> Array:
    """Model FLOPs at one share of the peak: the weighted median of those that the other sources reached."""
    t = evidence.table
    ideal = np.broadcast_to(t.batch * t.sequence * flops_per_token(t) / (t.devices * peak(t)), t.n)
    share = ideal[rest] / evidence.seconds[rest]
    order = np.argsort(share)
    sums = np.cumsum(_weights(evidence.groups[rest])[order])
    return np.asarray(ideal[own] / share[order][np.searchsorted(sums, sums[-1] / 2)])


def _kinds(evidence: Evidence, estimate: Array) -> dict[str, dict[str, float]]:
    mixture = np.broadcast_to(evidence.table.experts > 0, evidence.timed.size)
    found = {}
    for kind in KINDS:
        rows = evidence.timed & (mixture == (kind == "mixture"))
        groups = [rows & (evidence.groups == name) for name in np.unique(evidence.groups[rows])]
        errors = [_errors(estimate[own], evidence.seconds[own]) for own in groups]
        if errors:
            found[kind] = {
                "rows": int(rows.sum()),
                "mean": float(np.mean([one.mean() for one in errors])),
                "median": float(np.mean([np.median(one) for one in errors])),
            }
    return found


def choices(evidence: Evidence, estimate: Array, *, alike: bool) -> dict[str, tuple[int, int]]:
    """Pairs in order, and sets whose best was picked."""
    right = pairs = good = chosen = 0
    sets = evidence.sets(alike=alike)
    tokens = np.broadcast_to(evidence.table.batch * evidence.table.sequence, evidence.table.n)
    for name in np.unique(sets[evidence.timed]):
        rows = np.flatnonzero(evidence.timed & (sets == name))
        if rows.size < 2:
            continue
        measured, found = np.log(tokens[rows] / evidence.seconds[rows]), np.log(tokens[rows] / estimate[rows])
        one, other = np.triu_indices(rows.size, 1)
        apart = measured[one] - measured[other]
        counted = np.abs(apart) > np.log(APART)
        right += int(np.sum(counted & (np.sign(apart) == np.sign(found[one] - found[other]))))
        pairs += int(counted.sum())
        good += int(measured[np.argmax(found)] >= measured.max() + np.log(NEAR))
        chosen += 1
    suffix = "_alike" if alike else ""
    return {f"ordered{suffix}": (right, pairs), f"picked{suffix}": (good, chosen)}


def _memory(evidence: Evidence) -> dict[str, float]:
    """Mean error of the peak, by group."""
    known = evidence.ran & np.isfinite(evidence.peak) & ~evidence.transcribed
    found = np.broadcast_to(sum_of(memory(evidence.table)), evidence.table.n)
    return {
        str(group): _error(found[own], evidence.peak[own])
        for group in np.unique(evidence.groups[known])
        if (own := known & (evidence.groups == group)).any()
    }


def _unfit(evidence: Evidence) -> dict[str, tuple[int, int]]:
    """Failed rows called unfit, of those of sources that tell of failures; and false alarms among their others."""
    telling = np.isin(evidence.sources, np.unique(evidence.sources[~evidence.ran]))
    t = evidence.table
    found = np.broadcast_to(sum_of(memory(t)), t.n)
    unfit = ~np.broadcast_to(fits(t, found, Constants()), t.n)
    failed, ran = telling & ~evidence.ran, telling & evidence.ran
    return {
        "caught": (int((unfit & failed).sum()), int(failed.sum())),
        "alarms": (int((unfit & ran).sum()), int(ran.sum())),
    }


# Maximum a posteriori fit of the cost model's constants.
#
#     minimise  Σ_groups 4 · mean of ρ((log estimate − log measured) / σ)  +  Σ_constants ρ(x / spread)
#
# over x, the logarithm of each constant by its prior; the mean is over a group's rows. A group is a source on one kind
# of hardware, and each weighs the same, whatever its number of rows: as four independent measurements. σ is 10%. ρ
# grows linearly beyond three σ (ρ(z) = 2 δ² (√(1 + (z/δ)²) − 1), δ = 3), so that a run which was slow for reasons of
# its own does not decide. The priors keep what the runs do not determine where it was. Solved by Levenberg and
# Marquardt's method with that weight (Moré, *The Levenberg-Marquardt algorithm*, 1978; reweighting as in Holland and
# Welsch, 1977).

SIGMA = 0.1
WEIGHT = 4.0
ROBUST = 3.0

PRIORS = Constants()

SPREADS = {
    "volta": 0.15,
    "ampere": 0.15,
    "hopper": 0.2,
    "first": 0.1,
    "blackwell": 0.2,
    "ultra": 0.05,
    "ascend": 0.2,
    "other": 0.2,
    "eight": 0.15,
    "eight_hopper": 0.1,
    "four": 0.15,
    "half_rows": 0.25,
    "half_columns": 0.25,
    "half_depth": 0.25,
    "grouped": 0.05,
    "attention": 0.2,
    "memory": 0.08,
    "issue": 0.3,
    "elementwise": 0.2,
    "unfused": 0.3,
    "permute": 0.15,
    "launch": 0.3,
    "grace": 0.2,
    "stretches": 0.3,
    "routing": 0.3,
    "inside": 0.15,
    "across": 0.15,
    "scattered": 0.2,
    "dispatch": 0.08,
    "crowding": 0.5,
    "hop": 0.4,
    "net_hop": 0.4,
    "hidden_tensor": 0.3,
    "hidden_expert": 0.4,
    "hidden_data": 0.2,
    "beside": 0.3,
    "imbalance": 0.1,
    "straggling": 0.4,
    "fixed": 0.5,
}
"""How far off the prior of a constant may well be, of its logarithm; for each constant that times determine."""


def solve(table: Table, seconds: Array, groups: Sequence[str]) -> Constants:
    """The constants that explain best what was measured. `groups` names the group of each row."""
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    measured = np.log(seconds)
    spread = np.array(list(SPREADS.values()))

    def residuals(x: Array) -> Array:
        estimate = sum_of(seconds_by_kind(table, _constants(x)))
        return np.concatenate([(np.log(estimate) - measured) / SIGMA, x / spread])

    weights = np.concatenate([WEIGHT / counts[index], np.ones(len(SPREADS))])
    return _constants(_least(residuals, weights, len(SPREADS)))


def _constants(x: Array) -> Constants:
    return Constants(
        **{name: getattr(PRIORS, name) * float(np.exp(step)) for name, step in zip(SPREADS, x, strict=True)}
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
