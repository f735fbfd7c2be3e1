"""Answer to a question of training: what to run, how long a step takes, whether it fits, what ties and what binds; in
detail the best strategies, and why the first one wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from hyper_parallel.planner import format
from hyper_parallel.planner.answer import Answer, OutputFile, Page
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.error_interval import Support, support
from hyper_parallel.planner.metrics import APART, DIFFER, Figures, disagreement
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import figures_line
from hyper_parallel.planner.search import PRUNED
from hyper_parallel.planner.solve import Solved
from hyper_parallel.report.sheets import NONE, Fact, Sheet
from hyper_parallel.units import format_bytes, format_count, format_duration

WORD = "estimated"
SIMULATED = "simulated"


def answer_of(
    solved: Solved, asked: Question | None = None, say: Callable[[str], None] = lambda _: None
) -> Answer:
    """The answer to a question that was solved. `asked`: the question before it was narrowed (`refine`); the
    page draws its cost of memory. `say` is called with what the page takes time for.
    """
    best, question = solved.shown, solved.question
    found = solved.prediction
    word, fits = (WORD, "it fits") if found is None else (SIMULATED, "it fits")
    if found is not None and found.fits is False:
        fits = "ITS PEAK DOES NOT FIT"
    shape = question.workload.shape
    rests_on = support(best.row)
    tied, ties = _ties(solved)
    run, run_facts = _run(solved)
    simulated = [_simulated_sheet(solved)] if solved.simulated else []
    name = question.cluster.title
    where = name if name.endswith(f"x{question.devices}") else f"{question.devices:,} devices of {name}"
    # Few published runs are of this kind, or none: the details say of what.
    wide = ", widened" if rests_on.wider != 1.0 and found is None else ""

    def drawn() -> Page:
        from hyper_parallel.planner.page import front, page_of

        say("what memory costs in time")
        whole = replace(asked or question, profile=question.profile)
        return page_of(answer, solved, front(whole, constants_for(whole.profile, whole.cluster)))

    def file() -> OutputFile:
        chosen = solved.files[solved.chosen]
        text = chosen.text
        if solved.prediction is not None:
            estimated = figures_line(solved.best[solved.chosen])
            text = text.replace(estimated, figures_line(best, SIMULATED.capitalize()))
        return OutputFile(text, chosen.notes, "train")

    answer = Answer(
        word=WORD,
        verdict=f"{word}: run {shape.title} on {where} with {format.axes(best.strategy)}: "
        f"{format_duration(best.seconds)} a step; {fits}.",
        lines=[
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
            *run,
            ("beside", _beside(solved)) if found is not None else ("ties", tied),
            ("limit", solved.why.limit),
            *_compared(solved),
            *_simulated(solved),
            ("next", "--out run.yaml (a file for train), --details (why)"),
        ],
        heading=_heading(solved),
        facts=[*_facts(best, solved.best[solved.chosen]), *run_facts],
        sheets=[_choices(solved), *simulated, *solved.why.sheets, _searched(solved)],
        sentences=[rests_on.sentence, *ties, *solved.why.sentences],
        notes=solved.notes,
        data=_data(solved, rests_on),
        file=file,
        drawn=drawn,
    )
    return answer


def _heading(solved: Solved) -> str:
    """The heading of the answer: the model, the step, the machine."""
    question, work = solved.question, solved.question.workload
    shape = work.shape
    active = f", {format_count(shape.active_parameters)} a token" if shape.experts else ""
    what = f"{shape.title} ({format_count(shape.parameters)} parameters{active}{format.trained(work)})"
    step = f"{work.batch:,} × {work.sequence:,} tokens, {work.precision}, {work.optimizer}"
    return f"{WORD} steps of {what}, {step}, on {question.devices:,} devices of {question.cluster.title}"


def _facts(best: Figures, estimated: Figures) -> list[Fact]:
    """The figures of the best strategy. What collectives and stages wait for is of its estimate, a share of that."""
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
            format_duration(estimated.communicating),
            f"{estimated.communicating / estimated.seconds:.1%} of the {WORD} step",
        ),
        Fact(
            "bubble",
            format_duration(estimated.waiting),
            f"{estimated.waiting / estimated.seconds:.1%} of the {WORD} step",
        ),
    ]


def _run(solved: Solved) -> tuple[list[tuple[str, str]], list[Fact]]:
    """Days and cost of the whole run, as a line and as figures; empty where its tokens are not given."""
    best, price, tokens = solved.best[0], solved.question.price, solved.tokens
    if not tokens:
        return [], []
    days = f"{best.seconds * tokens / best.tokens / 86400:,.1f} days"
    line = f"{days} for {format_count(tokens)} tokens"
    facts = [Fact("a run", days, f"{WORD} for {format_count(tokens)} tokens")]
    if price:
        cost = f"{best.cost(price, tokens):,.0f}"
        hours = f"{best.device_hours * tokens / best.tokens:,.0f} device hours"
        line += f", cost {cost} at {price:g} a device hour"
        facts.append(Fact("its cost", cost, f"{WORD}: {hours} at {price:g} each"))
    return [("run", line)], facts


def _choices(solved: Solved) -> Sheet:
    """The best strategies, a row each; a strategy to compare with comes last."""
    first, counted = solved.best[0], solved.found.counted
    rows = [_row(str(place), found, first) for place, found in enumerate(solved.best, 1)]
    if solved.compared is not None:
        rows.append(_row("yours", solved.compared, first))
    count = f"{counted:,}" if counted < 10**7 else format_count(counted)
    return Sheet(
        f"the best {len(solved.best)} of {count} strategies",
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


def _simulated_sheet(solved: Solved) -> Sheet:
    """The simulator's figures of the best strategy, beside the estimate."""
    rows = []
    for place, found in enumerate(solved.simulated, 1):
        best = solved.best[place - 1]
        if found.seconds is None or found.peak is None:
            rows.append((str(place), found.reason, format_duration(best.seconds), NONE, NONE, NONE))
            continue
        apart = found.seconds / best.seconds - 1
        verdict = "they differ" if abs(apart) > DIFFER else "they agree"
        if found.parts and (differs := disagreement(found.parts, best.parts)) is not None:
            verdict += f", {differs}"
        if found.fits is False:
            verdict += "; ITS PREDICTED PEAK DOES NOT FIT"
        rows.append(
            (
                str(place),
                f"{verdict}; {found.reason}" if found.reason else verdict,
                format_duration(best.seconds),
                format_duration(found.seconds),
                format.signed(apart),
                f"{format_bytes(best.peak)} / {format_bytes(found.peak)}",
            )
        )
    chosen, quickest = solved.simulated[solved.chosen], ""
    if solved.chosen and chosen.seconds is not None:
        which = f"{solved.chosen + 1} is the quickest ({format_duration(chosen.seconds)})"
        quickest = f"; simulated, {which}, and --out writes it"
    return Sheet(
        "beside the simulation of its step",
        ("", "", "estimated", "predicted", "beside", "peak, estimate / predicted"),
        tuple(rows),
        left=2,
        drop=("peak, estimate / predicted", "beside"),
        note=f"predicted: the step's graph, simulated; they differ where it is over {DIFFER:.0%} off, and over "
        f"{APART:.0%} the operators or the collective are named from which most of it comes{quickest}",
    )


def _searched(solved: Solved) -> Sheet:
    """How many strategies there are, by what most were left out, and how far the answer may be from the optimum."""
    found = solved.found
    rows = [("legal strategies", f"{found.counted:,}")]
    rows += [(f"left out: {PRUNED[bound]}", f"{count:,}") for bound, count in found.pruned.items() if count]
    rows.append(("estimated", f"{found.weighed:,}"))
    gap = f"no strategy is better than the best by more than {found.gap:.2%}, by a proved bound"
    if found.gap <= 0:
        gap = "no strategy is better by this model: what was left out cannot be, by proved bounds"
    return Sheet(
        "what was searched",
        ("", "strategies"),
        tuple(rows),
        note=f"in {format_duration(found.seconds)}; {gap}",
    )


def _ties(solved: Solved) -> tuple[str, list[str]]:
    """How many sets of axes tie and what the quickest saves: a line, and a sentence where there is more to say."""
    found, best = solved.found, solved.best[0]
    if found.quickest is None:
        return "not asked for: the quickest estimate comes first", []
    quickest, sets, tie = found.quickest, len(found.ties), f"{solved.question.tie:.0%}"
    less = 1 - quickest.seconds / best.seconds
    saves = f"{less:.1%}" if less >= 5e-4 else ""
    if sets == 1:
        line = f"no other axes within {tie}" + (f"; other settings of these save {saves}" if saves else "")
    else:
        line = f"{sets} sets of axes within {tie}, the simplest first"
        line += f"; the quickest saves {saves}" if saves else ""
    if sets == 1 and quickest.seconds == best.seconds:
        return line, []
    first = "it is the quickest too"
    if less > 0:
        axes, settings = format.axes(quickest.strategy), format.settings(quickest.strategy)
        first = f"the quickest by estimate, {axes} ({settings}), takes {less:.1%} less"
    what = f"{sets} sets of axes tie by estimate" if sets > 1 else "one set of axes is the best by estimate"
    return line, [
        f"{what}: steps within {tie} of each other count as equal, and the simplest strategy comes first; {first} "
        "(--quickest puts it first)"
    ]


def _beside(solved: Solved) -> str:
    """The other strategies that were simulated, beside the one that is chosen."""
    chosen = solved.simulated[solved.chosen].seconds
    assert chosen is not None, "what is chosen was simulated"
    others = []
    for place, (found, best) in enumerate(zip(solved.simulated, solved.best, strict=False)):
        if place == solved.chosen:
            continue
        told = "cannot be simulated"
        if found.fits is False:
            told = "does not fit"
        elif found.seconds is not None:
            told = f"{format_duration(found.seconds)} ({format.signed(found.seconds / chosen - 1)})"
        others.append(f"{format.axes(best.strategy)} {told}")
    if others:
        return f"simulated too: {'; '.join(others)}"
    if len(solved.best) == 1:
        return "no other strategy was simulated"
    nearest = solved.best[1]
    return (
        f"no other strategy was simulated; the next, {format.axes(nearest.strategy)}, is estimated at "
        f"{format_duration(nearest.seconds)}"
    )


def _compared(solved: Solved) -> list[tuple[str, str]]:
    yours = solved.compared
    if yours is None:
        return []
    apart = format.signed(yours.seconds / solved.best[0].seconds - 1)
    fits = "fits" if yours.fits else "DOES NOT FIT"
    figures = f"{format_duration(yours.seconds)} ({apart}), {format_bytes(yours.peak)}, {fits}"
    return [("yours", f"{figures}: {format.axes(yours.strategy)}")]


def _simulated(solved: Solved) -> list[tuple[str, str]]:
    """What the estimate is of what was simulated, or why nothing was."""
    if not solved.simulated:
        return []
    found, best = solved.simulated[solved.chosen], solved.best[solved.chosen]
    if found.seconds is None or found.peak is None:
        return [("simulated", found.reason)]
    apart = format.signed(best.seconds / found.seconds - 1)
    line = f"{format_duration(best.seconds)} ({apart}), {format_bytes(best.peak)} by the closed forms"
    if found.reason:
        line += f"; simulated {found.reason}"
    if abs(best.seconds / found.seconds - 1) > DIFFER and (
        differs := disagreement(found.parts, best.parts, DIFFER)
    ):
        line += f"; the difference is {differs}"
    return [("estimate", line)]


_OF_ESTIMATE = ("parts_s", "memory_bytes", "exposed_communication_s", "bubble_s")
"""What a simulated step has in `predicted`, by other names."""


def _answer(solved: Solved) -> dict[str, Any]:
    """The figures of what is chosen; simulated ones without the parts of the estimate, which add up to another step."""
    found = solved.shown.to_json()
    left = _OF_ESTIMATE if solved.prediction is not None else ()
    return {name: value for name, value in found.items() if name not in left}


def _data(solved: Solved, rests_on: Support) -> dict[str, Any]:
    """The same as plain data. Times are seconds, memory is bytes; all are estimated."""
    question, work, found = solved.question, solved.question.workload, solved.found
    return {
        "estimated": solved.prediction is None,
        "chosen": solved.chosen,
        "answer": _answer(solved),
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
        "best": [best.to_json() for best in found.best],
        "evidence": rests_on.to_json(),
        "ties": found.quickest
        and {
            "within": question.tie,
            "sets_of_axes": len(found.ties),
            "quickest": found.quickest.to_json(),
        },
        "compared": solved.compared and solved.compared.to_json(),
        "predicted": [
            {
                "step_time_s": one.seconds,
                "peak_bytes": one.peak,
                "fits": one.fits,
                "reason": one.reason,
                "parts_s": dict(one.parts),
                "disagreement": differs and asdict(differs),
            }
            for one, best in zip(solved.simulated, found.best, strict=False)
            for differs in (disagreement(one.parts, best.parts) if one.parts else None,)
        ],
        "counted": found.counted,
        "pruned": dict(found.pruned),
        "gap": found.gap,
        "search_seconds": found.seconds,
        "why": solved.why.to_json(),
        "notes": list(solved.notes),
    }
