"""Answers a query: the best strategies, of those that tie the simplest first, with reasons and run files; and series of
queries: sweeps over devices and lengths, and the fewest devices that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import format, run_file
from hyper_parallel.planner.columns import RECOMPUTE, SCHEDULES
from hyper_parallel.planner.constants import Constants, constants_for, fitted
from hyper_parallel.planner.cost_model.memory import HOST_PART
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.explain import Explanation, explain
from hyper_parallel.planner.metrics import Figures, Simulated, figures
from hyper_parallel.planner.query import LARGEST_CLUSTER, Question
from hyper_parallel.planner.run_file import PlannedRunFile, memory_budget, planned_run_file, user_strategy
from hyper_parallel.planner.search import SearchResult, search, within
from hyper_parallel.planner.space import left_out
from hyper_parallel.planner.table import SPREAD, Table
from hyper_parallel.trace.simulated_error import simulated_between
from hyper_parallel.units import format_bytes

# The simplest of the strategies that tie: of estimates that the cost model cannot tell apart, which to show first.
#
# On published runs the cost model is off by several times `TIE` (docs/fidelity.md). So strategies whose estimated steps
# are within `TIE` of the quickest one are equal, and the one that asks for the least comes first:
#
# 1. the fewest axes beside data (replicate and shard), a second tensor axis counting as one more; of these none with
#    context, then those whose tensor, context and expert axes lie inside a node. An axis whose removal costs no more
# than
#    `TIE` goes too, so that each axis of the answer pays for itself;
# 2. of each set of degrees that is left, within the tie of what it takes at least, in this order: nothing in the host's
#    memory; less recomputed; 1F1B before other schedules; fewer parts of the model on a stage; axes laid in the usual
#    order; weights shared among all data ranks, or those of a node. Among several sets of degrees the one whose
# settings
#    ask for less by the same order is taken, then the smallest degrees.
#
# Each step is a separate search, limited to what ties. The others follow by their time, one for each set of axes before
# a second one with the same axes, so that the first of them differ in more than a degree.

TIE = 0.02
"""A share of a step; estimates of one model and cluster that differ by less count as equal."""

AXES = ("context", "tensor_y", "pipeline", "expert", "tensor_x")
"""Axes beside data, what is given up first in front."""

PARTS = (1, 2, 4, 8)
"""Parts of the model on a stage of a pipeline, that more are not chosen for."""


def simplest(question: Question, constants: Constants) -> SearchResult:
    """The best strategies of a question, of those that tie (`Question.tie`) the simplest first, if a tie is asked for.
    Errors are those of `search`."""
    if question.objective == "memory" or not question.tie:
        return search(question, constants)
    found = search(question, constants, question.tie)
    if not found.best:
        return found
    quickest = found.best[0]
    most = quickest.seconds * (1 + question.tie)
    least = min(_axes(one, question) for one in found.ties)
    plain = [
        _plain(one, question, constants, max(one.seconds, most))
        for one in found.ties
        if _axes(one, question) == least
    ]
    first, fewer = None, _with_fewer_axes(min(plain, key=_asks), question, constants)
    while fewer is not first:
        first = _plain(fewer, question, constants, max(fewer.seconds, most))
        fewer = _with_fewer_axes(first, question, constants)
    others = [one for one in found.best if _degrees(one) != _degrees(first)]
    best = [first, *_different(others, first)][: question.top]
    return replace(found, best=best, quickest=quickest)


def _different(others: list[Figures], first: Figures) -> list[Figures]:
    """By time, but of strategies with the same axes above 1 the second and later ones behind all sets of axes."""
    seen: set[tuple[bool, ...]] = set()
    new: list[Figures] = []
    more: list[Figures] = []
    for one in (first, *others):
        axes = tuple(degree > 1 for degree in _degrees(one).values())
        (more if axes in seen else new).append(one)
        seen.add(axes)
    return [*new[1:], *more]


def _degrees(choice: Figures) -> dict[str, float]:
    return {axis: float(getattr(choice.row, axis)[0]) for axis in AXES}


def _axes(choice: Figures, question: Question) -> tuple[int, bool, bool]:
    """How much the axes of a strategy ask for."""
    degrees = _degrees(choice)
    inner = degrees["tensor_x"] * degrees["tensor_y"] * degrees["context"]
    beyond = max(inner, degrees["expert"]) > (question.cluster.node or inf)
    return sum(degree > 1 for degree in degrees.values()), degrees["context"] > 1, beyond


def _asks(choice: Figures) -> tuple[float, ...]:
    """How much the settings and degrees of a strategy ask for."""
    row = {name: float(getattr(choice.row, name)[0]) for name in SPREAD}
    on_host = tuple(row[name] for name in ("weights_on_host", "state_on_host", "activations_on_host"))
    again = row["recomputed"] if row["recompute"] == RECOMPUTE.index("full") else 0.0
    product = prod(_degrees(choice).values())
    return sum(map(bool, on_host)), *on_host, again, row["schedule"], row["virtual"], product, choice.seconds


def _with_fewer_axes(choice: Figures, question: Question, constants: Constants) -> Figures:
    """The strategy without each axis whose removal costs no more than a tie. No other axis comes instead."""
    for axis in AXES:
        degrees = _degrees(choice)
        if degrees[axis] == 1 or axis in question.fix:
            continue
        without = {other: 1 for other, degree in degrees.items() if degree == 1 and other not in question.fix}
        plainer = replace(question, fix={**question.fix, **without, axis: 1})
        found = within(plainer, constants, choice.seconds * (1 + question.tie))
        if found is not None:
            return _with_fewer_axes(found, question, constants)
    return choice


def _plain(choice: Figures, question: Question, constants: Constants, most: float) -> Figures:
    """The plainest settings with a strategy's degrees and a step of limited length."""
    fixed: dict[str, Any] = {**question.fix, **_degrees(choice)}
    for options in _settings(question):
        for option in options:
            some = {name: value for name, value in option.items() if name not in question.fix}
            plainer = replace(question, fix={**fixed, **some})
            found = within(plainer, constants, most) if some else None
            if found is not None:
                choice, fixed = found, dict(plainer.fix)
                break
    return choice


def _settings(question: Question) -> Iterator[list[Mapping[str, Any]]]:
    """Settings from which one is taken each, the plainest first."""
    stays = {"weights_on_host": 0.0}
    nothing = {"state_on_host": 0.0, "activations_on_host": 0.0, **stays}
    yield [nothing, {"activations_on_host": 0.0, **stays}, {"state_on_host": 0.0, **stays}, stays]
    yield [{"recompute": "none"}, {"recompute": ("none", "selective")}]
    yield [{"schedule": schedule} for schedule in SCHEDULES]
    yield [{"virtual": tuple(range(1, most + 1))} for most in PARTS]
    yield [{"order": 0}]
    node = question.cluster.node
    yield [{"replicate": 1}, *([{"shard": node}] if node else [])]


class NothingFitsError(ConfigError):
    """No strategy fits the devices' memory; says what the smallest needs, and what would make it fit."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A question with its best strategies, and what they are compared with."""

    found: SearchResult
    why: Explanation
    """Why the first of the best is that."""
    files: Sequence[PlannedRunFile]
    """The best as run files, in their order."""
    simulated: Sequence[Simulated] = ()
    """What the simulator says of the first of the best, where it was asked."""
    compared: Figures | None = None
    """A strategy that the user gave, by the same model."""
    tokens: float = 0.0
    """Of the whole run; 0: not given."""
    notes: Sequence[str] = ()

    @property
    def question(self) -> Question:
        """The question."""
        return self.found.question

    @property
    def best(self) -> Sequence[Figures]:
        """The best strategies, the first first."""
        return self.found.best

    @property
    def prediction(self) -> Simulated | None:
        """The simulator's figures of what is chosen; None where there are none."""
        found = self.simulated[self.chosen] if self.simulated else None
        return None if found is None or found.seconds is None else found

    @property
    def shown(self) -> Figures:
        """The figures of what is chosen: simulated where they are, else estimated."""
        best, found = self.best[self.chosen], self.prediction
        if found is None or found.seconds is None or found.peak is None:
            return best
        times = best.seconds / found.seconds
        return replace(
            best,
            seconds=found.seconds,
            between=simulated_between(found.seconds, bool(best.row.experts.max() > 0)),
            peak=found.peak,
            tokens_per_second=best.tokens_per_second * times,
            mfu=found.mfu or best.mfu * times,
        )

    @property
    def chosen(self) -> int:
        """The place in `best` of what is written: of those that were simulated and fit the quickest, else the first."""
        timed = [
            (one.seconds, place)
            for place, one in enumerate(self.simulated)
            if one.seconds is not None and one.fits is not False
        ]
        return min(timed)[1] if timed else 0


def solve(
    question: Question,
    constants: Constants | None = None,
    *,
    compare: Path | None = None,
    tokens: float = 0.0,
    model: Mapping[str, Any] | None = None,
) -> Solved:
    """Search for the best strategies of a question, with reasons and run files.

    `compare`: a file with the user's strategy. `tokens`: of the whole run. `model`: the section `model` of a run file,
    where it is known. Raises ConfigError where no strategy is legal, and NothingFitsError where no legal one fits.
    """
    known = constants or constants_for(question.profile, question.cluster)
    notes: list[str] = []
    compared = None
    if compare is not None:
        row = Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))
        row = row.replaced(**user_strategy(compare, question, notes))
        compared = figures(row, estimate(row, known))[0]
    found = simplest(question, known)
    if not found.best:
        raise _nothing_fits(found, known)
    # What lies on the host is written as a budget.
    budgets = [
        memory_budget(question.cluster, fitted(), one.on_host) if one.on_host else None for one in found.best
    ]
    unsearched = left_out(question.workload.shape.mixer, question.runnable)
    return Solved(
        found=found,
        why=explain(found.best[0], question, known),
        files=[
            planned_run_file(one, question, model, budget)
            for one, budget in zip(found.best, budgets, strict=True)
        ],
        compared=compared,
        tokens=tokens,
        notes=[
            *_undivided(question),
            *(f"not searched: {reason}" for reason in unsearched),
            *run_file.runnable_note((str(place), one) for place, one in enumerate(found.best, 1)),
            *notes,
        ],
    )


def _undivided(question: Question) -> list[str]:
    """A note where the batch itself rules out data parallelism over all devices, though it is large enough."""
    batch, devices = question.workload.batch, question.devices
    if batch % devices == 0 or 2 * batch < devices:
        return []
    near = [f"{devices * times:,}" for times in (batch // devices, batch // devices + 1) if times]
    return [
        f"{batch:,} sequences do not divide over {devices:,} devices, so that not all can share data; "
        f"--batch {' or '.join(near)} would"
    ]


def nothing_fits(subject: str, found: SearchResult, needs: str, helps: Sequence[str]) -> NothingFitsError:
    """The error of a question for which nothing fits: what the smallest strategy needs, and what would help."""
    least = found.smallest
    assert least is not None
    *others, last = helps
    return NothingFitsError(
        f"{subject}: the smallest of {found.counted:,} needs {needs} (estimated; {format.axes(least.strategy)}, "
        f"{format.settings(least.strategy)}); what would make it fit: {', '.join(others)}{', or ' * bool(others)}{last}"
    )


def _nothing_fits(found: SearchResult, constants: Constants) -> NothingFitsError:
    question, least = found.question, found.smallest
    assert least is not None
    devices = question.devices
    # A host may hold a part of it, where the cluster describes one.
    host = float(least.row.host_bytes.max()) * HOST_PART
    needs = f"{format.memory(least)} on a device"
    if least.on_host:
        needs += (
            f" and {format_bytes(least.on_host)} of the {format_bytes(host)} of host that a device may use"
        )
    helps = []
    for more in (devices << power for power in range(1, 7)):
        if more <= LARGEST_CLUSTER and ask(question.on(more), constants).fits:
            helps.append(f"{more:,} devices (estimated; --fit finds the fewest)")
            break
    if not host:
        helps.append("a host's memory in the cluster file (host, links.host)")
    if question.fix:
        helps.append("fixing less")
    if question.workload.sequence > 1024:
        helps.append("a shorter sequence")
    subject = (
        f"{question.workload.shape.title} fits no strategy on {devices:,} {'device' if devices == 1 else 'devices'} "
        f"of {question.cluster.title}"
    )
    return nothing_fits(subject, found, needs, helps or ["devices with more memory"])


Progress = Callable[[str], None]


def ask(question: Question, constants: Constants) -> SearchResult:
    """Answer a question for which there may be no legal strategy, or none that fits; `reason` says which."""
    try:
        found = simplest(question, constants)
    except ConfigError as error:
        return SearchResult(question=question, reason=str(error))
    return found if found.fits else replace(found, reason="no strategy fits")


def curve(
    questions: Iterable[Question], constants: Constants, progress: Progress | None = None
) -> list[SearchResult]:
    """The answers, in order."""
    found = []
    remaining = list(questions)
    for place, question in enumerate(remaining, 1):
        if progress is not None:
            which = f" ({place} of {len(remaining)})" if len(remaining) > 1 else ""
            progress(f"{question.devices:,} devices, {question.workload.sequence:,} tokens a sequence{which}")
        found.append(ask(question, constants))
    return found


def fewest(question: Question, constants: Constants, progress: Progress | None = None) -> SearchResult | None:
    """The least number of devices on which something fits: exact among whole nodes, and below a node among all.

    Doubled from one device until something fits; then every whole node between that and its half is asked, in turn.
    None where nothing fits on any number of devices.
    """
    devices, first = 1, None
    while devices <= LARGEST_CLUSTER:
        point = curve([question.on(devices)], constants, progress)[0]
        if point.fits:
            first = point
            break
        devices *= 2
    if first is None:
        return None
    step = question.cluster.node or 1
    step = step if devices > step else 1
    for fewer in range(math.floor(devices / 2 / step + 1) * step, devices, step):
        point = curve([question.on(fewer)], constants, progress)[0]
        if point.fits:
            return point
    return first
