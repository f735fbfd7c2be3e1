"""The planner's closed forms against published training runs: python benchmarks/published.py

Each source of `fit_constants.published_runs` is held out whole, constants are fitted on the others, and its rows are
estimated (`fit_constants.fit`). Then the constants are fitted on all sources and written, with the quantiles
of the residuals that intervals are made of, to src/hyper_parallel/planner/constants.json. A part of docs/fidelity.md
and benchmarks/results/published.json are written from the outcome. It takes about half a minute and trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from commandline import run
from fit_constants.fit import (
    Judgement,
    Residuals,
    choices,
    collected,
    judge,
    seconds_of,
    solve,
)
from fit_constants.published_runs import COMPUTED, RECIPES, RUNS, TRANSCRIBED, Evidence, evidence
from measure import is_elsewhere
from pages import Benchmark, spaced, table

from hyper_parallel.planner.constants import FITTED, Constants
from hyper_parallel.planner.cost_model.memory import memory
from hyper_parallel.planner.cost_model.step import open_facts
from hyper_parallel.planner.error_interval import KINDS, Runs, widening
from hyper_parallel.planner.table import Array, sum_of

AXES = ("tensor_x", "pipeline", "context", "expert", "zero", "micro")
WIDE = (0.85, 0.95)
ALIKE = "of one batch and length too, so that only the strategy differs"
COVERED = "the same with the runs that no constant is fitted on"
LIMITS: dict[str, tuple[float | tuple[float, float], str, str]] = {
    "step": (0.10, "at most", "mean error of step time"),
    "median": (0.06, "at most", "median error of step time"),
    "memory": (0.15, "at most", "mean error of peak memory"),
    "ordered": (0.98, "at least", "pairs of one model and cluster, more than 15% apart, in the right order"),
    "picked": (0.92, "at least", "models and clusters whose pick is within 10% of the best"),
    "caught": (0.90, "at least", "failed rows called unfit"),
    "alarms": (0.04, "at most", "rows that ran called unfit"),
    "dense_mean": (0.08, "at most", "mean error of step time, models without experts"),
    "mixture_mean": (0.15, "at most", "mean error of step time, mixtures of experts"),
    "ordered_alike": (0.95, "at least", f"pairs {ALIKE}, in the right order"),
    "dense_held": (WIDE, "within", "rows within the 90% interval, models without experts"),
    "mixture_held": (WIDE, "within", "rows within the 90% interval, mixtures of experts"),
    "dense_covered": (WIDE, "within", f"{COVERED}, models without experts"),
    "mixture_covered": (WIDE, "within", f"{COVERED}, mixtures of experts"),
}
"""What is asked for, and how the page calls it; an interval that holds more than 95% is too wide."""
ASKED = "S"
"""How the names of the sources begin for which that was asked; P6 is an addition."""
SHARES = ("ordered", "picked", "ordered_alike", "picked_alike", "caught", "alarms")


def _constants(constants: Constants, found: Judgement, known: Sequence[Runs]) -> dict[str, Any]:
    return {
        "note": "by benchmarks/published.py: fitted on RUNS and RECIPES of evidence; residuals of held-out sources",
        "constants": {name: _rounded(value) for name, value in asdict(constants).items()},
        "residuals": {
            kind: {"low": _rounded(low), "high": _rounded(high)}
            for kind in KINDS
            for low, high in (found.residuals.interval(kind),)
        },
        "runs": [asdict(one) for one in known],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def outcome(runs: Evidence, found: Judgement, constants: Constants) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    columns = ("rows", "bias", "error", "median", "null", "held")
    values = zip(found.rows, found.bias, found.step, found.medians, found.null, found.held, strict=True)
    groups = {
        name: dict(zip(columns, own, strict=True)) for name, own in zip(found.groups, values, strict=True)
    }
    shares = {name: list(getattr(found, name)) for name in SHARES}
    asked = [name.startswith(ASKED) for name in found.groups]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(np.array(values)[asked]))

    summary = {
        "step": mean(found.step),
        "median": mean(found.medians),
        "null": mean(found.null),
        "memory": float(np.mean(list(found.memory.values()))),
        "held": mean(found.held),
        **{f"{kind}_{name}": value for kind, one in found.kinds.items() for name, value in one.items()},
        "step_of_all": float(np.mean(found.step)),
        "median_of_all": float(np.mean(found.medians)),
        **{name: part / max(whole, 1) for name, (part, whole) in shares.items()},
    }
    return {
        "groups": groups,
        "memory": found.memory,
        "summary": summary,
        "shares": shares,
        "axes": _by_axis(runs, found),
        "worst": _worst(runs, found),
        "measured": _measured(runs, found),
        "constants": asdict(constants),
        "interval": {kind: list(found.residuals.interval(kind)) for kind in KINDS},
    }


def _measured(runs: Evidence, found: Judgement) -> dict[str, Any]:
    """Pairs, picks and S02's errors without its rows on one node, which look computed (SOURCES.md)."""
    kept = replace(runs, timed=runs.fitted)
    own = kept.timed & (runs.sources == COMPUTED)
    errors = np.abs(found.estimate[own] / runs.seconds[own] - 1)
    chosen = choices(kept, found.estimate, alike=False) | choices(kept, found.estimate, alike=True)
    return {
        **{name: list(told) for name, told in chosen.items()},
        "left_out": int((runs.timed & runs.computed).sum()),
        "rows": int(own.sum()),
        "error": float(errors.mean()),
    }


def unseen(
    runs: Evidence, constants: Constants, residuals: Residuals, known: Sequence[Runs]
) -> dict[str, dict[str, float]]:
    """Errors of the estimates by source, kind and hardware, for runs on which nothing was fitted.

    A row's interval is of the residuals of other sources.
    """
    told = seconds_of(runs.table, constants)
    fastest, slowest = open_facts(runs.table, constants, told)
    ratio = told / runs.seconds
    mixture = np.broadcast_to(runs.table.experts > 0, runs.table.n)
    kinds = zip(mixture, runs.sources, strict=True)
    between = [residuals.interval(KINDS[int(kind)], without=str(source)) for kind, source in kinds]
    low, high = (np.array(between) * widening(runs.table, known, runs.sources)[:, None]).T
    peak = np.broadcast_to(sum_of(memory(runs.table)), runs.table.n) / runs.peak
    held = (fastest * np.exp(-high) <= runs.seconds) & (runs.seconds <= slowest * np.exp(-low))
    found = {}
    groups = np.where(mixture, np.char.add(runs.groups, ", mixtures"), runs.groups)
    for group in np.unique(groups[runs.timed]):
        own = runs.timed & (groups == group)
        told = own & np.isfinite(peak)
        found[str(group)] = {
            "rows": int(own.sum()),
            "bias": float(np.median(ratio[own])) - 1,
            "error": float(np.abs(ratio[own] - 1).mean()),
            "worst": float(np.exp(np.abs(np.log(ratio[own])).max())),
            "mixture": bool(mixture[own].any()),
            "held": float(held[own].mean()),
            **({"memory": float(np.abs(peak[told] - 1).mean())} if told.any() else {}),
        }
    return found


def covered(kind: str, found: Judgement, others: Mapping[str, Mapping[str, float]]) -> float:
    """The share of rows within their interval, mean over all groups of a kind: held out, and never fitted on."""
    own = found.kinds[kind]
    unseen = [one["held"] for one in others.values() if one["mixture"] == (kind == "mixture")]
    return (own["held"] * own["groups"] + sum(unseen)) / (own["groups"] + len(unseen))


def _by_axis(runs: Evidence, found: Judgement) -> dict[str, dict[str, list[float]]]:
    """For each axis and degree: rows, median error with its sign, mean error."""
    errors = found.estimate / runs.seconds - 1
    table: dict[str, dict[str, list[float]]] = {axis: {} for axis in AXES}
    for axis in AXES:
        column = _column(runs, axis)
        for value in np.unique(column[runs.timed]):
            own = errors[runs.timed & (column == value)]
            table[axis][f"{value:g}"] = [own.size, float(np.median(own)), float(np.abs(own).mean())]
    return table


def _column(runs: Evidence, axis: str) -> Array:
    return np.broadcast_to(getattr(runs.table, axis), runs.table.n)


def _worst(runs: Evidence, found: Judgement) -> list[dict[str, Any]]:
    """The two worst rows of each group."""
    errors = np.where(runs.timed, found.estimate / runs.seconds - 1, 0.0)
    rows = []
    for name in found.groups:
        own = np.flatnonzero(runs.timed & (runs.groups == name))
        for row in own[np.argsort(-np.abs(np.log1p(errors[own])))][:2]:
            spread = {axis: float(_column(runs, axis)[row]) for axis in AXES}
            told = {"group": name, "model": str(runs.models[row]), "error": float(errors[row])}
            rows.append({**told, **spread})
    return rows


REASONS = {
    "S01": "repeats of one configuration differ by 5–25% in this source",
    "S04": "successive releases differ by up to 2 × on one configuration of a mixture; recomputation is not stated",
    "S16": "what the host adds to routed layers differs between the recipes of this source",
    "S22": "scripts beside the published figure are assumed to be the measured ones",
}
"""Why the worst rows are off, where that is known."""


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/fidelity.md."""
    summary, shares, measured = result["summary"], result["shares"], result["measured"]
    memory = ", ".join(f"{name}: {error:.1%}" for name, error in result["memory"].items())
    kinds = (("dense", "without experts"), ("mixture", "mixtures of experts"))
    columns, shown = ("error", "median", "null", "held"), ("mean", "median", "held")
    return spaced(
        table(" | asked | found | ", (_limit(name, summary[name], shares) for name in LIMITS)),
        f"Of one batch and length too, so that only the strategy differs: picks {_share(shares['picked_alike'])}.",
        f"The {measured['left_out']:,} rows of S02 on one node look computed and not measured (SOURCES.md): no "
        f"constant is fitted on them. Without them pairs are {_share(measured['ordered'])}, pairs of one batch and "
        f"length {_share(measured['ordered_alike'])}, picks {_share(measured['picked'])}, and the {measured['rows']} "
        f"rows of S02 that are left are off by {measured['error']:.1%}.",
        table(
            " | rows | mean error | median error | in interval",
            (
                (
                    text,
                    f"{summary[f'{kind}_rows']:,.0f}",
                    *_percents(summary, (f"{kind}_{name}" for name in shown)),
                )
                for kind, text in kinds
            ),
        ),
        "Intervals are of residuals of held-out sources and of the runs below that no constant is fitted on, and wider "
        "for rows of whose kind few other sources have runs (`planner.error_interval`); a row's own source is left out "
        "of its interval.",
        "Step time, the interval and the null model are means over the groups of S01 to S30. With P6, an addition, "
        f"step time is off by {summary['step_of_all']:.1%} and {summary['median_of_all']:.1%}; pairs and picks "
        "count its rows too.",
        f"One constant share of the peak, fitted in the same way, is off by {summary['null']:.0%} in the mean.",
        table(
            "Source, hardware | rows | median, signed | mean error | median error | null model | in interval",
            (
                (name, f"{one['rows']:,}", f"{one['bias']:+.1%}", *_percents(one, columns))
                for name, one in result["groups"].items()
            ),
        ),
        f"Peak memory, mean error: {memory}.",
        *_unseen_parts(result["unseen"]),
        "By axis, all rows alike: rows, median error with its sign, mean error.",
        table("Axis | degree: rows, median, mean", map(_axis, result["axes"].items())),
        "The worst rows of each group:",
        table("Source, hardware | model | spread | error | why", map(_worst_row, result["worst"])),
    )


def _percents(shares: Mapping[str, float], names: Iterable[str]) -> Iterator[str]:
    return (f"{shares[name]:.1%}" for name in names)


def _share(counts: Sequence[int]) -> str:
    part, whole = counts
    return f"{part / max(whole, 1):.1%} ({part:,} of {whole:,})"


def _limit(name: str, found: float, shares: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    limit, side, text = LIMITS[name]
    if isinstance(limit, tuple):
        asked, met = f"{limit[0]:.0%} to {limit[1]:.0%}", limit[0] <= found <= limit[1]
    else:
        asked, met = f"{side} {limit:.0%}", found <= limit if side == "at most" else found >= limit
    told = _share(shares[name]) if name in shares else f"{found:.1%}"
    return text, asked, told, "" if met else "**missed**"


def _unseen_parts(groups: Mapping[str, Mapping[str, float]]) -> Iterator[str | Iterable[str]]:
    yield (
        f"Of {sum(one['rows'] for one in groups.values())} more runs, of sources that `SOURCES.md` names, no constant "
        "is fitted on any:"
    )
    kinds = []
    for mixture, text in ((False, "without experts"), (True, "mixtures of experts")):
        some = [one for one in groups.values() if one["mixture"] == mixture]
        if counted := sum(one["rows"] for one in some):
            error = float(np.mean([one["error"] for one in some]))
            held = sum(one["rows"] * one["held"] for one in some) / counted
            kinds.append((text, counted, f"{error:.1%}", f"{held:.0%}"))
    yield table(" | rows | mean error over groups | in interval", kinds)
    rows = []
    for name, one in groups.items():
        off = f"{one['bias']:+.1%}", f"{one['error']:.1%}", f"{one['worst']:.2f}", f"{one['held']:.0%}"
        rows.append((name, one["rows"], *off, f"{one['memory']:.1%}" if "memory" in one else ""))
    yield table(
        "Source, hardware | rows | median, signed | mean error | worst, times | in interval | peak memory, mean",
        rows,
    )


def _axis(of: tuple[str, Mapping[str, Sequence[float]]]) -> tuple[str, str]:
    axis, degrees = of
    told = (f"{degree}: {n:,.0f}, {bias:+.0%}, {error:.0%}" for degree, (n, bias, error) in degrees.items())
    return axis, "; ".join(told)


def _worst_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    spread = ", ".join(f"{axis} {row[axis]:g}" for axis in AXES if row[axis] not in (0, 1))
    why = REASONS.get(row["group"].split(",")[0], "not known") if abs(row["error"]) > 0.15 else ""
    return row["group"], row["model"], spread, f"{row['error']:+.0%}", why


BENCHMARK = Benchmark("published", {"fidelity.md": lines})


def main() -> None:
    """Judge, fit, write."""
    runs = evidence(RUNS, RECIPES)
    others = evidence(TRANSCRIBED)
    rows = runs.fitted
    constants = solve(runs.table.take(rows), runs.seconds[rows], runs.groups[rows].tolist())
    told = seconds_of(others.table, constants)
    known = [  # by source and kind, the runs whose times count
        own
        for some in (runs, others)
        for own in collected(some.table.take(some.timed), some.sources[some.timed])
    ]
    unseen_residuals = Residuals.of(others, open_facts(others.table, constants, told), known)
    found = judge(runs, unseen_residuals, known)
    result = outcome(runs, found, constants)
    result["unseen"] = unseen(others, constants, found.residuals, known)
    result["summary"] |= {f"{kind}_covered": covered(kind, found, result["unseen"]) for kind in KINDS}
    if not is_elsewhere():
        FITTED.write_text(json.dumps(_constants(constants, found, known), indent=1) + "\n")
    BENCHMARK.keep(result)


if __name__ == "__main__":
    run(main)
