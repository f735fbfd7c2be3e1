"""Tables of `simulate_published.py`: errors by source, and every miss with what it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.planner.disagreement import disagreement

ASKED = 0.12
"""Mean error that was asked for."""
MISS = 0.15

Row = Mapping[str, Any]


def lines(rows: Mapping[str, Row], chosen: int) -> list[str]:
    """What is written into the page; `chosen`: rows that the rule chooses, of which some may be left to simulate."""
    told = [one for one in rows.values() if "predicted" in one]
    refused = {name: one for name, one in rows.items() if "refused" in one}
    misses = {name: one for name, one in rows.items() if "predicted" in one and _off(one) > MISS}
    groups: dict[str, list[Row]] = {}
    for one in told:
        groups.setdefault(f"{one['source']}, {one['hardware']}", []).append(one)
    kinds: dict[str, list[Row]] = {
        "without experts": [one for one in told if not one["experts"]],
        "with experts": [one for one in told if one["experts"]],
        "8,192 tokens a sequence or more": [one for one in told if one["sequence"] >= 8192],
        "pipelines": [one for one in told if "pipeline" in one["spread"]],
        "tensor": [one for one in told if "tensor_x" in one["spread"]],
        "ZeRO-3": [one for one in told if one["spread"].get("zero") == 3],
    }
    mean, closed = _mean(told, "predicted"), _mean(told, "estimated")
    return [
        f"{len(told)} published runs simulated, of {chosen} that the rule chooses: mean error of step time "
        f"**{mean:.1%}** ({ASKED:.0%} was asked for), median {_median(told, 'predicted'):.1%}, "
        f"{len(misses)} off by more than {MISS:.0%}. The closed forms, whose constants have not seen the row's source: "
        f"mean {closed:.1%}, median {_median(told, 'estimated'):.1%} of the same rows.",
        "",
        "| Source, hardware | rows | simulated, median with its sign | mean error | closed forms, mean error |",
        "|---|---|---|---|---|",
        *(_group(name, groups[name]) for name in sorted(groups)),
        *(_group(name, own) for name, own in kinds.items() if own),
        "",
        f"Every run that is off by more than {MISS:.0%}, with the classes of operators and collectives that take most "
        "of the simulated step, and where both predictors differ by more than 15%, what that comes from:",
        "",
        "| Run | Model, framework | Strategy | simulated | closed forms | most of the simulated step | they differ |",
        "|---|---|---|---|---|---|---|",
        *(_miss(name, misses[name]) for name in sorted(misses, key=lambda name: -_off(misses[name]))),
        *(["", "Not simulated, with the reason:", ""] if refused else []),
        *(f"- {name}, {one['model']}: {one['refused']}" for name, one in refused.items()),
    ]


def _group(name: str, rows: Sequence[Row]) -> str:
    signed = statistics.median(one["predicted"] / one["measured"] - 1 for one in rows)
    errors = f"{_mean(rows, 'predicted'):.1%} | {_mean(rows, 'estimated'):.1%}"
    return f"| {name} | {len(rows)} | {signed:+.1%} | {errors} |"


def _miss(name: str, one: Row) -> str:
    spread = ", ".join(f"{axis} {degree}" for axis, degree in one["spread"].items())
    parts = sorted(one["parts"].items(), key=lambda part: -part[1])[:3]
    most = ", ".join(f"{kind} {seconds / one['predicted']:.0%}" for kind, seconds in parts)
    # The closed forms' parts of these names count as waiting.
    simulated = dict(one["parts"])
    simulated["waiting"] = sum(simulated.pop(name, 0.0) for name in ("waiting", "fixed", "straggling"))
    apart = disagreement(simulated, one["estimated_parts"])
    errors = " | ".join(f"{one[key] / one['measured'] - 1:+.0%}" for key in ("predicted", "estimated"))
    return f"| {name} | {one['model']}, {one['framework']} | {spread} | {errors} | {most} | {apart or ''} |"


def _off(one: Row) -> float:
    return abs(one["predicted"] / one["measured"] - 1)


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(abs(one[key] / one["measured"] - 1) for one in rows)


def _median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(abs(one[key] / one["measured"] - 1) for one in rows)
