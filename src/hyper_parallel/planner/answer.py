"""The planner's answer as text and JSON: ten lines (what to run, how long a step takes, whether it fits, what ties,
what binds), and in detail (the best strategies, and why the first one wins).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hyper_parallel.planner import format
from hyper_parallel.planner.metrics import APART, Figures, disagreement, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import PRUNED
from hyper_parallel.planner.solve import PrintedAnswer
from hyper_parallel.report.sheets import NONE, Fact, Sheet
from hyper_parallel.report.table import answer, wrapped
from hyper_parallel.report.table import render as text_of
from hyper_parallel.units import format_bytes, format_count, format_duration

WORD = "estimated"

DIFFER = 0.05
"""A share of a step beyond which estimate and prediction are said to differ."""


def heading(one: PrintedAnswer) -> str:
    """What is answered: the model, the step, the machine."""
    question, work = one.question, one.question.workload
    shape = work.shape
    active = f", {format_count(shape.active_parameters)} a token" if shape.experts else ""
    what = f"{shape.name or 'the model'} ({format_count(shape.parameters)} parameters{active}{format.trained(work)})"
    step = f"{work.batch:,} × {work.sequence:,} tokens, {work.precision}, {work.optimizer}"
    where = question.cluster.name or question.cluster.source
    return f"{WORD} steps of {what}, {step}, on {question.devices:,} devices of {where}"


def facts(one: PrintedAnswer) -> list[Fact]:
    """The figures of the best strategy."""
    best = one.best[0]
    interval = f"{WORD} seconds of a step; 90% of measured steps lie within {format.between(best)}"
    return [
        Fact("best strategy", format.axes(best.strategy), format.settings(best.strategy)),
        Fact("step", format_duration(best.seconds), interval),
        Fact("MFU", f"{best.mfu:.1%}", "model FLOPs / (step · devices · peak FLOP/s)"),
        Fact("tokens/s", f"{best.tokens_per_second:,.0f}", "of each device"),
        Fact(
            "peak memory",
            format_bytes(best.peak),
            f"of {format_bytes(best.capacity)} ({best.peak / best.capacity:.0%}), the fullest device",
        ),
        Fact(
            "exposed communication",
            format_duration(best.communicating),
            f"{best.communicating / best.seconds:.1%} of the step",
        ),
        Fact("bubble", format_duration(best.waiting), f"{best.waiting / best.seconds:.1%} of the step"),
        *_cost(one, best),
    ]


def _cost(one: PrintedAnswer, best: Figures) -> list[Fact]:
    price, tokens = one.question.price, one.tokens
    if not tokens:
        return []
    days = best.seconds * tokens / best.tokens / 86400
    found = [Fact("a run", f"{days:,.1f} days", f"{WORD} for {format_count(tokens)} tokens")]
    if price:
        meaning = f"{WORD}: {best.device_hours * tokens / best.tokens:,.0f} device hours at {price:g} each"
        found.append(Fact("its cost", f"{best.cost(price, tokens):,.0f}", meaning))
    return found


def choices(one: PrintedAnswer) -> Sheet:
    """The best strategies, a row each; a strategy to compare with comes last."""
    rows = [_row(str(place), found, one.best[0]) for place, found in enumerate(one.best, 1)]
    if one.compared is not None:
        rows.append(_row("yours", one.compared, one.best[0]))
    return Sheet(
        f"the best {len(one.best)} of {_count(one.answer.counted)} strategies",
        ("", "axes", "settings", "step (90%)", "beside", "MFU", "tokens/s", "peak", "exposed", "bubble"),
        tuple(rows),
        left=3,
        note="beside: to the best; exposed: communication that nothing hides; tokens/s: of each device; a second "
        "strategy with the axes of another comes behind all sets of axes",
        drop=("bubble", "exposed", "tokens/s", "MFU", "beside"),
    )


def _row(name: str, one: Figures, best: Figures) -> tuple[str, ...]:
    return (
        name,
        format.axes(one.strategy),
        format.settings(one.strategy),
        f"{format_duration(one.seconds)} ({format.between(one)})",
        "" if one is best else format.signed(one.seconds / best.seconds - 1),
        f"{one.mfu:.1%}",
        f"{one.tokens_per_second:,.0f}",
        format_bytes(one.peak) + ("" if one.fits else ": does not fit"),
        f"{one.communicating / one.seconds:.1%}",
        f"{one.waiting / one.seconds:.1%}",
    )


def simulated(one: PrintedAnswer) -> Sheet:
    """What the simulator says of the best, beside the estimate."""
    rows = []
    for place, found in enumerate(one.refined, 1):
        best = one.best[place - 1]
        if found.seconds is None or found.peak is None:
            rows.append((str(place), found.reason, format_duration(best.seconds), NONE, NONE, NONE))
            continue
        apart = found.seconds / best.seconds - 1
        said = "they differ" if abs(apart) > DIFFER else "they agree"
        if found.parts and (differs := disagreement(found.parts, best.parts)) is not None:
            said += f", {differs}"
        if found.fits is False:
            said += "; ITS PREDICTED PEAK DOES NOT FIT"
        rows.append(
            (
                str(place),
                f"{said}; {found.reason}" if found.reason else said,
                format_duration(best.seconds),
                format_duration(found.seconds),
                format.signed(apart),
                f"{format_bytes(best.peak)} / {format_bytes(found.peak)}",
            )
        )
    return Sheet(
        "beside the simulation of its step",
        ("", "", "estimated", "predicted", "beside", "peak, estimate / predicted"),
        tuple(rows),
        left=2,
        drop=("peak, estimate / predicted", "beside"),
        note=f"predicted: the step's graph, simulated; they differ where it is over {DIFFER:.0%} off, and over "
        f"{APART:.0%} the operators or the collective are named from which most of it comes{_quickest(one)}",
    )


def _quickest(one: PrintedAnswer) -> str:
    found = one.refined[one.chosen]
    if one.chosen == 0 or found.seconds is None:
        return ""
    return f"; simulated, {one.chosen + 1} is the quickest ({format_duration(found.seconds)}), and --out writes it"


def searched(one: PrintedAnswer) -> Sheet:
    """How many strategies there are, and by what most were left out."""
    answer = one.answer
    rows = [("legal strategies", f"{answer.counted:,}")]
    rows += [(f"left out: {PRUNED[bound]}", f"{count:,}") for bound, count in answer.pruned.items() if count]
    rows.append(("estimated", f"{answer.weighed:,}"))
    return Sheet(
        "what was searched",
        ("", "strategies"),
        tuple(rows),
        note=f"in {format_duration(answer.seconds)}; {_gap(one)}",
    )


def _gap(one: PrintedAnswer) -> str:
    """How far the answer may be from the model's optimum."""
    gap = one.answer.gap
    if gap <= 0:
        return "no strategy is better by this model: what was left out cannot be, by proved bounds"
    return f"no strategy is better than the best by more than {gap:.2%}, by a proved bound"


def sheets(one: PrintedAnswer) -> list[Sheet]:
    """All tables, in the order in which they are read."""
    refined = [simulated(one)] if one.refined else []
    return [choices(one), *refined, *one.why.sheets, searched(one)]


def ties(one: PrintedAnswer) -> list[str]:
    """A sentence on how many sets of axes tie, and which is the quickest."""
    if one.tied is None or (one.tied.sets == 1 and one.tied.quickest.seconds == one.best[0].seconds):
        return []
    quickest = figures(one.tied.quickest.table, one.tied.quickest.estimate)[0]
    less = 1 - quickest.seconds / one.best[0].seconds
    first = "it is the quickest too"
    if less > 0:
        first = (
            f"the quickest by estimate, {format.axes(quickest.strategy)} ({format.settings(quickest.strategy)}), takes "
            f"{less:.1%} less"
        )
    sets = f"{one.tied.sets} sets of axes tie" if one.tied.sets > 1 else "one set of axes is the best"
    return [
        f"{sets}: steps within {one.question.tie:.0%} of each other count as equal, and the simplest "
        f"strategy comes first; {first} (--quickest puts it first)"
    ]


def text(one: PrintedAnswer, width: int = 140) -> str:
    """All of it for the terminal. The first word is `estimated`."""
    body = text_of(heading(one), facts(one), sheets(one), WORD, width).rstrip()
    ends = [one.support.sentence, *ties(one), *one.why.sentences, *(f"note: {note}" for note in one.notes)]
    return "\n".join([body, "", *(wrapped(end, width) for end in ends)])


def to_json(one: PrintedAnswer) -> dict[str, Any]:
    """The same as plain data. Times are seconds, memory is bytes; all are estimated."""
    question, work = one.question, one.question.workload
    return {
        "estimated": True,
        "model": work.shape.name,
        "parameters": work.shape.parameters,
        "active_parameters": work.shape.active_parameters,
        "trained_parameters": work.trained_parameters,
        "batch": work.batch,
        "sequence": work.sequence,
        "precision": work.precision,
        "cluster": question.cluster.name,
        "devices": question.devices,
        "objective": question.objective,
        "best": [found.to_json() for found in one.best],
        "evidence": one.support.to_json(),
        "ties": None
        if one.tied is None
        else {
            "within": one.question.tie,
            "sets_of_axes": one.tied.sets,
            "quickest": figures(one.tied.quickest.table, one.tied.quickest.estimate)[0].to_json(),
        },
        "compared": None if one.compared is None else one.compared.to_json(),
        "predicted": [
            {
                "step_time_s": found.seconds,
                "peak_bytes": found.peak,
                "fits": found.fits,
                "reason": found.reason,
                "parts_s": dict(found.parts),
                "disagreement": None if differs is None else asdict(differs),
            }
            for found, best in zip(one.refined, one.best, strict=False)
            for differs in (disagreement(found.parts, best.parts) if found.parts else None,)
        ],
        "counted": one.answer.counted,
        "pruned": dict(one.answer.pruned),
        "gap": one.answer.gap,
        "search_seconds": one.answer.seconds,
        "why": one.why.to_json(),
        "notes": list(one.notes),
    }


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**7 else format_count(number)


# The planner's answer in ten lines: what to run, how long a step takes, whether it fits, what ties, what binds.
#
# The long answer has everything else: the other strategies, and where time and memory go.


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
    # Few published runs are of this kind, or none: the details say of what.
    wide = "" if one.support.wider == 1.0 else ", widened"
    lines = [
        ("settings", format.settings(best.strategy)),
        (
            "step",
            f"{format_duration(best.seconds)} (90%{wide}: {format.between(best)}), MFU {best.mfu:.0%}, "
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
    return f"{sets}; the quickest saves {less:.1%}" if less >= 5e-4 else sets


def _limit(one: PrintedAnswer) -> str:
    """What keeps the step from being quicker."""
    best, why = one.best[0], one.why
    if why.blocked is not None:
        there = why.blocked.figures
        saves = format.signed(there.seconds / best.seconds - 1)
        # What follows from a change of axes is in the details.
        change = why.blocked.change.partition(", sequence_parallel")[0]
        return f"memory: {change} ({saves}) needs {format_bytes(there.peak)}"
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
    return f"{write} (a file for train), --details (why)"
