"""The end of an answer: the planner's best strategies, simulated from their captured steps.

The estimate is of closed forms; the simulation is of every operator that `train` would run, with the collectives in the
order in which training runs them, and is what `hyper-parallel simulate` says of the written file. Neither is a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.few_layers import predict_few_layers
from hyper_parallel.estimate.predict import AboveLimit
from hyper_parallel.graph.capture_overrides import collect_between, uncollected
from hyper_parallel.planner import format
from hyper_parallel.planner.captured_costs import engine_profile
from hyper_parallel.planner.constants import Constants, constants_for
from hyper_parallel.planner.explain import explain
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.host_memory import LEAST as PAYS
from hyper_parallel.planner.host_memory import moved_kinds, paying
from hyper_parallel.planner.metrics import DIFFER, Simulated
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.planner.solve import NothingFitsError, Solved, solve
from hyper_parallel.units import format_bytes, format_duration

ORDERED = 1.03
"""Of a device's memory: what a step may hold in the order of the model's code and still be ordered and simulated, since
ordering may lower the peak (by 2% for DeepSeek-V3 on 512 H100, by 1% for Kimi-K2 on 384 910C)."""
LEAST = 1.02
"""Of the estimate of memory: by how much it is scaled at least."""
ROUNDS = 3
"""Times that strategies are simulated, until one fits."""
COUNT = 3
"""Strategies of a round that are simulated, at most."""


def solved(
    question: Question,
    count: int = COUNT,
    progress: Callable[[str], None] = lambda _: None,
    *,
    compare: Path | None = None,
    tokens: float = 0.0,
    model: Mapping[str, Any] | None = None,
) -> Solved:
    """The answer with at most `count` of its best strategies simulated: the first, and while the best simulated step is
    longer than the next one's estimate by more than `DIFFER`, that one.

    Of what `train` runs, closed forms take their costs from a captured step of the model, and a strategy has to fit:
    where the simulated peak of none does, the estimate of memory is scaled by what it was too low by, and the question
    is answered again. Something lies on the host only where nothing fits without, and a note says why of each kind;
    else a note says what the host would gain. Raises as `solve`, and NothingFitsError where none fits after ROUNDS.
    """
    solve_once = partial(solve, compare=compare, tokens=tokens, model=model)
    question, notes = with_captured_costs(question, model, progress)
    if question.runnable and not set(ON_HOST) & question.fix.keys():
        # A plan of what moves takes minutes for a large model: first what needs none.
        stays = replace(question, fix={**question.fix, **dict.fromkeys(ON_HOST, 0.0)})
        try:
            found = _solved(stays, count, progress, solve_once)
        except NothingFitsError:
            progress("nothing fits on the devices alone; planning with the host's memory")
            narrowed, _, moved = paying(question, constants_for(question.profile, question.cluster))
            question = narrowed if moved else question
        else:
            return replace(found, notes=[*found.notes, *notes, *_on_host(question, found)])
    found = _solved(question, count, progress, solve_once)
    if question.runnable:
        known = constants_for(question.profile, question.cluster)
        moved = moved_kinds(question, found.best[found.chosen], known)
        notes += [one.sentence for one in moved]
    return replace(found, notes=[*found.notes, *notes])


def with_captured_costs(
    question: Question, model: Mapping[str, Any] | None, progress: Callable[[str], None]
) -> tuple[Question, list[str]]:
    """The question with the costs of its model's captured step, where it is of what `train` runs; and a note where
    there is no such step."""
    if not question.profile.ordered:
        return question, []
    try:
        with uncollected():
            profile = engine_profile(question, model, progress)
    except HyperParallelError as error:
        return question, [f"its step cannot be captured, so that closed forms alone price it: {error}"]
    collect_between()
    return replace(question, profile=profile), []


def _on_host(question: Question, found: Solved) -> list[str]:
    """A note of what something on the host is estimated to gain, where that is enough."""
    _, best, moved = paying(question, constants_for(question.profile, question.cluster))
    less = 0.0 if best is None else 1 - best.seconds / found.best[0].seconds
    if best is None or not moved or less < PAYS:
        return []
    kinds = " ".join(f"--fix {one.column}={best.strategy[one.column]}" for one in moved)
    gains = format.joined(f"{one.name} {one.gain:.0%}" for one in moved if one.gain is not None)
    return [
        f"with {format.axes(best.strategy)} ({format.settings(best.strategy)}) a step is estimated to take {less:.0%} "
        f"less (beside the best without: {gains}); {kinds} plans that, and simulates it within a budget, which takes "
        "minutes"
    ]


def _solved(
    question: Question,
    count: int,
    progress: Callable[[str], None],
    solve_once: Callable[[Question, Constants], Solved],
) -> Solved:
    """One question, answered until a strategy that was simulated fits, and while one that does not fit was estimated
    to be more than `DIFFER` quicker: others like it may fit."""
    known = constants_for(question.profile, question.cluster)
    answer, priced = None, known
    for _ in range(ROUNDS):
        found = solve_once(question, known)
        # One that does not fit is not shown, so that its time need not be known.
        limit = ORDERED * found.best[0].capacity if question.runnable else None
        found = replace(found, simulated=_simulated_while(found, count, progress, limit))
        # Also of a step that was not ordered, though ordering may lower its peak: with more room more is hidden.
        over = [
            (one.peak / best.peak, best.seconds)
            for one, best in zip(found.simulated, found.best, strict=False)
            if one.fits is False and one.peak is not None
        ]
        fits = not question.runnable or len(over) < len(found.simulated)
        if fits and (answer is None or found.shown.seconds < answer.shown.seconds):
            answer, priced = found, known
        quickest = answer.shown.seconds if answer else inf
        quicker = [times for times, seconds in over if seconds * (1 + DIFFER) < quickest]
        if not question.runnable or not quicker:
            break
        progress(
            f"the simulated peak of the quickest does not fit, {min(quicker):.2f} times the estimate or more; planning "
            "again"
        )
        collect_between()
        known = replace(known, slack=known.slack * max(min(quicker), LEAST))
    if answer is not None:
        # The reasons are those of what is answered.
        best = answer.best[answer.chosen]
        return replace(answer, why=explain(best, question, priced)) if answer.chosen else answer
    peak = min(one.peak for one in found.simulated if one.peak is not None)
    raise NothingFitsError(
        f"no strategy that was simulated fits, in {ROUNDS} rounds: the smallest simulated peak is {format_bytes(peak)} "
        f"of {format_bytes(found.best[0].capacity)}; what would make it fit: more devices, a shorter sequence, or a "
        "smaller micro-batch (--fix micro=1)"
    )


def _simulated_while(
    found: Solved, count: int, progress: Callable[[str], None], limit: float | None
) -> list[Simulated]:
    """The predictions of the first strategies, until none that is left may be quicker."""
    told: list[Simulated] = []
    for place, best in enumerate(found.best[:count]):
        quickest = min((one.seconds for one in told if one.seconds and one.fits is not False), default=inf)
        if best.seconds * (1 + DIFFER) > quickest:
            break
        told += refine(found.files[place : place + 1], found.question.cluster, progress, limit, quickest)
    return told


def refine(
    files: Sequence[PlannedRunFile],
    cluster: Cluster,
    progress: Callable[[str], None],
    limit: float | None = None,
    quickest: float = inf,
) -> list[Simulated]:
    """The prediction of each planned run file, or the reason why there is none. `limit` as of `predict_run`.

    `quickest`: seconds; a step that takes longer may be left unordered."""
    found: list[Simulated] = []
    for file in files:
        progress("capturing and simulating its step")
        found.append(_simulated(file, cluster, progress, limit, quickest))
        collect_between()
    return found


# What is read off the Timeline is inside: a search for garbage would walk through all of its spans.
@uncollected()
def _simulated(
    file: PlannedRunFile,
    cluster: Cluster,
    progress: Callable[[str], None],
    limit: float | None,
    quickest: float,
) -> Simulated:
    try:
        run = config.from_dict(file.data, source="the planned file")
        machine = cluster.for_workers(run.effective_strategy.axes.world)
        few = predict_few_layers(run, machine, limit, progress, quickest)
        if few is not None and few.seconds is None and few.least >= quickest:
            return Simulated(
                None, few.fits, few.peak, f"its busiest queue alone takes {format_duration(few.least)}"
            )
        if few is not None and few.seconds is None:
            raise AboveLimit(int(few.peak), limit or 0.0)
        if few is not None:
            reason = "from steps of few of its layers"
            return Simulated(few.seconds, few.fits, few.peak, reason, few.parts, few.mfu)
        return Simulated.of(predict_run(run, machine, limit=limit, progress=progress))
    except AboveLimit as error:
        reason = "holds more than a device has in the order of the model's code; it was not simulated"
        return Simulated(None, fits=False, peak=error.peak, reason=reason)
    except HyperParallelError as error:
        return Simulated(None, reason=f"cannot be simulated: {error}")
