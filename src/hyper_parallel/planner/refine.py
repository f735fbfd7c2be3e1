"""Refinement: simulates the planner's best strategies from their captured steps.

The estimate is of closed forms; the prediction is of every operator that `train` would run, with the collectives in the
order in which training runs them. Neither is a measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.predict import AboveLimit
from hyper_parallel.graph.capture_overrides import collect_between, uncollected
from hyper_parallel.planner.constants import Constants, constants_for
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.metrics import Simulated
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.planner.solve import NothingFitsError, Solved, solve
from hyper_parallel.units import format_bytes, format_duration

NOTE = (
    "not searched: the host's memory, since something fits without it and a budget takes minutes to simulate; without "
    "--refine it is"
)
"""Said where what fits without a budget is not compared with what moves."""
ORDERED = 1.03
"""Of a device's memory: what a step may hold in the order of the model's code and still be ordered and simulated, since
ordering may lower the peak (by 2% for DeepSeek-V3 on 512 H100, by 1% for Kimi-K2 on 384 910C)."""
LEAST = 1.02
"""Of the estimate of memory: by how much it is scaled at least."""
ROUNDS = 3
"""Times that strategies are simulated, until one fits."""


def solved(
    question: Question,
    count: int,
    progress: Callable[[str], None],
    *,
    compare: Path | None = None,
    tokens: float = 0.0,
    model: Mapping[str, Any] | None = None,
) -> Solved:
    """The answer with its `count` best strategies simulated.

    A question of what `train` runs wants a strategy that fits: where the simulated peak of none does, the estimate of
    memory is scaled by what it was too low by, and the question is answered again. Something lies on the host only
    where nothing fits without. Raises as `solve`, and NothingFitsError where none fits after ROUNDS.
    """
    solve_once = partial(solve, compare=compare, tokens=tokens, model=model)
    if question.runnable and not set(ON_HOST) & question.fix.keys():
        # A plan of what moves takes minutes for a large model: first what needs none.
        stays = replace(question, fix={**question.fix, **dict.fromkeys(ON_HOST, 0.0)})
        try:
            solved = _solved(stays, count, progress, solve_once)
        except NothingFitsError:
            progress("nothing fits on the devices alone; planning with the host's memory")
        else:
            return replace(solved, notes=[*solved.notes, NOTE])
    return _solved(question, count, progress, solve_once)


def _solved(
    question: Question,
    count: int,
    progress: Callable[[str], None],
    solve_once: Callable[[Question, Constants], Solved],
) -> Solved:
    """One question, answered until a strategy that was simulated fits."""
    known = constants_for(question.profile, question.cluster)
    for _ in range(ROUNDS):
        solved = solve_once(question, known)
        # One that does not fit is not shown, so that its time need not be known.
        limit = ORDERED * solved.best[0].capacity if question.runnable and count == 1 else None
        solved = replace(solved, simulated=refine(solved.files[:count], question.cluster, progress, limit))
        # Also of a step that was not ordered, though ordering may lower its peak: with more room more is hidden.
        over = [
            found.peak / best.peak
            for found, best in zip(solved.simulated, solved.best, strict=False)
            if found.fits is False and found.peak is not None
        ]
        if not question.runnable or len(over) < len(solved.simulated):
            return solved
        progress(
            f"the simulated peak of none fits, {min(over):.2f} times the estimate or more; planning again"
        )
        collect_between()
        known = replace(known, slack=known.slack * max(min(over), LEAST))
    peak = min(found.peak for found in solved.simulated if found.peak is not None)
    raise NothingFitsError(
        f"no strategy that was simulated fits, in {ROUNDS} rounds: the smallest simulated peak is {format_bytes(peak)} "
        f"of {format_bytes(solved.best[0].capacity)}; what would make it fit: more devices, a shorter sequence, or a "
        "smaller micro-batch (--fix micro=1)"
    )


def refine(
    files: Sequence[PlannedRunFile],
    cluster: Cluster,
    progress: Callable[[str], None],
    limit: float | None = None,
) -> list[Simulated]:
    """The prediction of each planned run file, or the reason why there is none. `limit` as of `predict_run`."""
    found: list[Simulated] = []
    begun = time.monotonic()
    for place, file in enumerate(files, 1):
        which = f"strategy {place} of {len(files)}"
        # The time left is by the mean of what is done; before that nothing is known.
        left = ", the first of them" if len(files) > 1 else ", a minute or two for 8 billion parameters"
        if found:
            seconds = (time.monotonic() - begun) / len(found) * (len(files) - len(found))
            left = f", about {format_duration(seconds)} left"
        progress(f"{which}: capturing and simulating its step{left}")
        if place > 1:
            collect_between()
        found.append(_simulated(file, cluster, partial(_say, progress, which), limit))
    return found


def _say(progress: Callable[[str], None], about: str, text: str) -> None:
    progress(f"{about}: {text}")


# What is read off the Timeline is inside: a search for garbage would walk through all of its spans.
@uncollected()
def _simulated(
    file: PlannedRunFile, cluster: Cluster, progress: Callable[[str], None], limit: float | None
) -> Simulated:
    try:
        run = config.from_dict(file.data, source="the planned file")
        world = run.effective_strategy.axes.world
        return Simulated.of(predict_run(run, cluster.for_workers(world), limit=limit, progress=progress))
    except AboveLimit as error:
        reason = "holds more than a device has in the order of the model's code; it was not simulated"
        return Simulated(None, fits=False, peak=error.peak, reason=reason)
    except HyperParallelError as error:
        return Simulated(None, reason=f"cannot be simulated: {error}")
