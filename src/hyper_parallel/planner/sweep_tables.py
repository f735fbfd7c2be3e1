"""Answers to series of questions: how a step scales, the longest sequence, the fewest devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import format, run_file
from hyper_parallel.planner.answer import Answer
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import SearchResult
from hyper_parallel.report.sheets import NONE, Sheet
from hyper_parallel.units import format_bytes, format_count, format_duration

_UNUSED = ("cost",)
"""Columns that a short answer leaves out where no row has a value."""


def scaling(points: Sequence[SearchResult], tokens: float = 0.0) -> Answer:
    """The best step for each number of devices, beside what the first would give if it scaled ideally."""
    return _answer(points, _scaled(points, tokens), _scales(points))


def _scaled(points: Sequence[SearchResult], tokens: float) -> Sheet:
    """A row for each number of devices."""
    first = next((_best(point) for point in points if point.fits), None)
    rows = []
    for point in points:
        best = _best(point)
        if best is None or first is None:
            rows.append((f"{point.question.devices:,}", point.reason, *[NONE] * 6))
            continue
        rows.append(
            (
                f"{best.devices:,}",
                f"{format.axes(best.strategy)}; {format.settings(best.strategy)}",
                _step(best),
                f"{best.mfu:.1%}",
                f"{best.tokens_per_second * best.devices:,.0f}",
                f"{best.tokens_per_second / first.tokens_per_second:.1%}",
                format_bytes(best.peak),
                _cost(best, point.question, tokens),
            )
        )
    return Sheet(
        "how the step scales",
        ("devices", "best strategy", "step (90%)", "MFU", "tokens/s, all", "of ideal", "peak", "cost"),
        tuple(rows),
        left=2,
        drop=("tokens/s, all", "MFU", "cost", "peak"),
        note="of ideal: tokens/s of a device beside those of the first row; the batch is the same in all rows"
        + _cost_note(points[0].question, tokens),
    )


def _scales(points: Sequence[SearchResult]) -> str:
    """The gain of more devices, in a sentence."""
    work = points[0].question.workload
    name = work.shape.title
    found = [best for best in map(_best, points) if best is not None]
    if not found:
        return f"{name} fits on none of these numbers of devices"
    first, last = found[0], found[-1]
    least = f"{name}, {format_duration(first.seconds)} a step on {first.devices:,} devices"
    if first is last:
        return f"{least}; it fits"
    share = last.tokens_per_second / first.tokens_per_second
    return (
        f"{least}, {format_duration(last.seconds)} on {last.devices:,}: each of them does {share:.0%} of the "
        "work of one of the first"
    )


def lengths(points: Sequence[SearchResult]) -> Answer:
    """The best step for each length of a sequence, and the longest of these that fits."""
    rows = []
    for point in points:
        best, work = _best(point), point.question.workload
        head = (f"{work.sequence:,}", f"{work.batch:,}")
        if best is None:
            rows.append((*head, point.reason, *[NONE] * 4))
            continue
        how = f"{format.axes(best.strategy)}; {format.settings(best.strategy)}"
        speed = f"{best.tokens_per_second:,.0f}"
        rows.append((*head, how, _step(best), f"{best.mfu:.1%}", speed, format_bytes(best.peak)))
    sheet = Sheet(
        "how long sequences can be",
        ("tokens a sequence", "sequences", "best strategy", "step (90%)", "MFU", "tokens/s", "peak"),
        tuple(rows),
        left=3,
        drop=("tokens/s", "MFU", "sequences"),
        note="as many tokens a step in all rows, as near as whole sequences come; tokens/s: of each device",
    )
    lengths = sorted(point.question.workload.sequence for point in points)
    fitting = [point.question.workload.sequence for point in points if point.fits]
    if not fitting:
        longest = "none of these lengths fits (estimated)"
    elif max(fitting) == lengths[-1]:
        longest = f"{lengths[-1]:,} tokens fit, the longest that was asked for; longer ones may fit as well (estimated)"
    else:
        more = min(length for length in lengths if length > max(fitting))
        longest = (
            f"the longest of these lengths that fits: {max(fitting):,} tokens; {more:,} do not (estimated)"
        )
    beyond = points[-1].question.workload
    known = beyond.shape.positions
    notes = (f"{beyond.shape.name} is made for {known:,} tokens",) if 0 < known < beyond.sequence else ()
    return _answer(points, sheet, longest, *notes)


def fewest(question: Question, point: SearchResult | None, tokens: float = 0.0) -> Answer:
    """The fewest devices on which it fits. Raises ConfigError where it fits on none."""
    name, where = question.workload.shape.title, question.cluster.title
    if point is None:
        raise ConfigError(
            f"{name} fits on no number of devices of {where} with this batch and sequence: a stage of one layer is too "
            "large for a device; try a shorter sequence, a smaller batch, or devices with more memory"
        )
    best, devices = point.best[0], point.question.devices
    says = (
        f"{name} fits on {devices:,} {'device' if devices == 1 else 'devices'} of {where}, and on no fewer "
        f"(estimated): {format.axes(best.strategy)}, {format_duration(best.seconds)} a step"
    )
    sheet = replace(
        _scaled([point], tokens).without("of ideal"),
        title="the fewest devices",
        note=_cost_note(question, tokens)[2:],
    )
    return _answer([point], sheet, says)


def _answer(points: Sequence[SearchResult], sheet: Sheet, *sentences: str) -> Answer:
    """The answer whose first sentence is its verdict."""
    work, cluster = points[0].question.workload, points[0].question.cluster
    shape = work.shape
    shown = [(f"the best on row {place}", _best(point)) for place, point in enumerate(points, 1)]
    notes = run_file.runnable_note((name, best) for name, best in shown if best is not None)
    return Answer(
        word="estimated",
        verdict=f"estimated: {sentences[0].replace(' (estimated)', '')}",
        lines=[("next", "--details (settings, 90% intervals)")],
        heading=f"estimated steps of {shape.title} ({format_count(shape.parameters)} parameters"
        f"{format.trained(work)}; {format_count(work.tokens)} tokens, {work.precision}) on {cluster.title}",
        sheets=[sheet],
        brief=_brief(sheet),
        sentences=[*sentences, *notes],
        data={
            "estimated": True,
            "says": [*sentences, *notes],
            "points": [_data(point) for point in points],
        },
    )


def _brief(sheet: Sheet) -> Sheet:
    """The table without settings; of a reason, what comes before its explanation."""
    at = sheet.columns.index("best strategy")
    rows = tuple(
        (*row[:at], row[at].partition("; ")[0].partition(": ")[0], *row[at + 1 :]) for row in sheet.rows
    )
    brief = replace(sheet, rows=rows, note="")
    for name in _UNUSED:
        if name in brief.columns and {row[brief.columns.index(name)] for row in brief.rows} == {NONE}:
            brief = brief.without(name)
    return brief


def _data(point: SearchResult) -> dict[str, Any]:
    best, work = _best(point), point.question.workload
    head = {
        "devices": point.question.devices,
        "sequence": work.sequence,
        "batch": work.batch,
        "fits": point.fits,
    }
    return head | ({"reason": point.reason} if best is None else {"best": best.to_json()})


def _best(point: SearchResult) -> Figures | None:
    return point.best[0] if point.best else None


def _step(best: Figures) -> str:
    return f"{format_duration(best.seconds)} ({format.between(best)})"


def _cost(best: Figures, question: Question, tokens: float) -> str:
    if not question.price:
        return NONE
    return f"{best.cost(question.price, tokens or best.tokens):,.{0 if tokens else 2}f}"


def _cost_note(question: Question, tokens: float) -> str:
    if not question.price:
        return ""
    return f"; cost: of {format_count(tokens) + ' tokens' if tokens else 'a step'} at {question.price:g} a device hour"
