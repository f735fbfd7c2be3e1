"""The planner's answer in ten lines: what to run, how long a step takes, whether it fits, what ties, what binds.

`planner.answer` has everything else: the other strategies, and where time and memory go.
"""

from __future__ import annotations

from hyper_parallel.planner import format
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.solve import PrintedAnswer
from hyper_parallel.report.table import answer, wrapped
from hyper_parallel.units import format_bytes, format_count, format_duration


def verdict(one: PrintedAnswer) -> str:
    """What to run, and that it fits, in a sentence."""
    best, question = one.best[0], one.question
    name = question.workload.shape.name or "the model"
    return (
        f"estimated: run {name} on {machine(question)} with {format.axes(best.strategy)}: "
        f"{format_duration(best.seconds)} a step; it fits."
    )


def machine(question: Question) -> str:
    """`h100x64`, or `64 devices of h100` where the cluster's name does not say how many."""
    name = question.cluster.name or question.cluster.source
    return name if name.endswith(f"x{question.devices}") else f"{question.devices:,} devices of {name}"


def short(one: PrintedAnswer, width: int = 80) -> str:
    """For the terminal. The first word is `estimated`."""
    best = one.best[0]
    lines = [
        ("settings", format.settings(best.strategy)),
        (
            "step",
            f"{format_duration(best.seconds)} (90%: {format.between(best)}), MFU {best.mfu:.0%}, "
            f"{best.tokens_per_second:,.0f} tokens/s a device",
        ),
        (
            "memory",
            f"{format.memory(best)} a device ({best.peak / best.capacity:.0%})"
            + (f", host {format_bytes(best.on_host)}" if best.on_host else ""),
        ),
        *_run(one, best),
        ("ties", _ties(one)),
        ("limit", _limit(one)),
        *_compared(one, best),
        *_simulated(one),
        *([("evidence", one.support.sentence)] if one.support.wider != 1.0 else []),
        ("next", _next(one)),
    ]
    return answer(verdict(one), lines, width) + _notes(one, width)


def _notes(one: PrintedAnswer, width: int) -> str:
    """What to know besides; empty where nothing is."""
    return "".join(wrapped(f"note: {note}", width) + "\n" for note in one.notes)


def _run(one: PrintedAnswer, best: Figures) -> list[tuple[str, str]]:
    if not one.tokens:
        return []
    days = best.seconds * one.tokens / best.tokens / 86400
    price = one.question.price
    cost = f", cost {best.cost(price, one.tokens):,.0f} at {price:g} a device hour" if price else ""
    return [("run", f"{days:,.1f} days for {format_count(one.tokens)} tokens{cost}")]


def _ties(one: PrintedAnswer) -> str:
    if one.tied is None:
        return "not asked for: the quickest estimate comes first"
    quickest = figures(one.tied.quickest.table, one.tied.quickest.estimate)[0]
    less = 1 - quickest.seconds / one.best[0].seconds
    within = f"within {one.question.tie:.0%}"
    if one.tied.sets == 1:
        more = f"; other settings of these save {less:.1%}" if less >= 5e-4 else ""
        return f"no other axes {within}{more}"
    sets = f"{one.tied.sets} sets of axes {within}, the simplest first"
    return f"{sets}; quickest: {format.axes(quickest.strategy)}, −{less:.1%}" if less >= 5e-4 else sets


def _limit(one: PrintedAnswer) -> str:
    """What keeps the step from being quicker."""
    best, why = one.best[0], one.why
    if why.blocked is not None:
        there = why.blocked.figures
        saves = format.signed(there.seconds / best.seconds - 1)
        return f"memory: {why.blocked.change} ({saves}) needs {format_bytes(there.peak)}"
    if why.eased and why.eased[0].saved > 0:
        return f"{why.eased[0].what}: twice of it saves {why.eased[0].saved:.0%}; memory does not bind"
    return "memory does not bind"


def _compared(one: PrintedAnswer, best: Figures) -> list[tuple[str, str]]:
    yours = one.compared
    if yours is None:
        return []
    fits = "fits" if yours.fits else "DOES NOT FIT"
    return [
        (
            "yours",
            f"{format_duration(yours.seconds)} ({format.signed(yours.seconds / best.seconds - 1)}), "
            f"{format_bytes(yours.peak)}, {fits}: {format.axes(yours.strategy)}",
        )
    ]


def _simulated(one: PrintedAnswer) -> list[tuple[str, str]]:
    """What the simulator says of what is written."""
    if not one.refined:
        return []
    found, best = one.refined[one.chosen], one.best[one.chosen]
    which = f"strategy {one.chosen + 1} of --details" if one.chosen else "this strategy"
    if found.seconds is None or found.peak is None:
        return [("predicted", f"{which}: {found.reason}")]
    fits = "it fits" if found.fits is not False else "IT DOES NOT FIT"
    apart = format.signed(found.seconds / best.seconds - 1)
    return [
        (
            "predicted",
            f"{which}, simulated: {format_duration(found.seconds)} ({apart} to its estimate), "
            f"{format_bytes(found.peak)}, {fits}",
        )
    ]


def _next(one: PrintedAnswer) -> str:
    write = "--out run.yaml" if one.question.runnable else "--runnable --out run.yaml"
    return f"{write} (for train), --details (why), --refine 1 (simulate)"
