"""The simplest of the strategies that tie: of estimates that the cost model cannot tell apart, which to show first.

On published runs the cost model is off by several times `TIE` (docs/fidelity.md). So strategies whose estimated steps
are within `TIE` of the quickest one are equal, and the one that asks for the least comes first:

1. the fewest axes beside data (replicate and shard), a second tensor axis counting as one more; of these none with
   context, then those whose tensor, context and expert axes lie inside a node. An axis whose removal costs no more than
   `TIE` goes too, so that each axis of the answer pays for itself;
2. of each set of degrees that is left, within the tie of what it takes at least, in this order: nothing in the host's
   memory; less recomputed; 1F1B before other schedules; fewer parts of the model on a stage; axes laid in the usual
   order; weights shared among all data ranks, or those of a node. Among several sets of degrees the one whose settings
   ask for less by the same order is taken, then the smallest degrees.

Each step is a separate search, limited to what ties. The others follow by their time, one for each set of axes before
a second one with the same axes, so that the first of them differ in more than a degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from hyper_parallel.planner.choice import Answer, Choice
from hyper_parallel.planner.codes import RECOMPUTE, SCHEDULES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer, within
from hyper_parallel.planner.table import SPREAD

TIE = 0.02
"""A share of a step; estimates of one model and cluster that differ by less count as equal."""

AXES = ("context", "tensor_y", "pipeline", "expert", "tensor_x")
"""Axes beside data, what is given up first in front."""

PARTS = (1, 2, 4, 8)
"""Parts of the model on a stage of a pipeline, that more are not chosen for."""


@dataclass(frozen=True)
class Tied:
    """What ties with the quickest strategy."""

    quickest: Choice
    sets: int
    """How many sets of degrees tie, the quickest one's included."""


def simplest(question: Question, constants: Constants) -> tuple[Answer, Tied | None]:
    """The best strategies of a question, of those that tie (`Question.tie`) the simplest first; and what ties, None
    where nothing fits or no tie is asked for. Errors are those of `answer`."""
    if question.objective == "memory" or not question.tie:
        return answer(question, constants), None
    found = answer(question, constants, question.tie)
    if not found.best:
        return found, None
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
    return replace(found, best=best), Tied(quickest, len(found.ties))


def _different(others: list[Choice], first: Choice) -> list[Choice]:
    """By time, but of strategies with the same axes above 1 the second and later ones behind all sets of axes."""
    seen, new, more = {_kind(first)}, [], []
    for one in others:
        (more if _kind(one) in seen else new).append(one)
        seen.add(_kind(one))
    return [*new, *more]


def _kind(choice: Choice) -> tuple[bool, ...]:
    return tuple(degree > 1 for degree in _degrees(choice).values())


def _degrees(choice: Choice) -> dict[str, float]:
    return {axis: float(getattr(choice.table, axis)[0]) for axis in AXES}


def _axes(choice: Choice, question: Question) -> tuple[int, bool, bool]:
    """How much the axes of a strategy ask for."""
    degrees = _degrees(choice)
    inner = degrees["tensor_x"] * degrees["tensor_y"] * degrees["context"]
    beyond = max(inner, degrees["expert"]) > (question.cluster.node or inf)
    return sum(degree > 1 for degree in degrees.values()), degrees["context"] > 1, beyond


def _asks(choice: Choice) -> tuple[float, ...]:
    """How much the settings and degrees of a strategy ask for."""
    row = {name: float(getattr(choice.table, name)[0]) for name in SPREAD}
    on_host = tuple(row[name] for name in ("weights_on_host", "state_on_host", "activations_on_host"))
    again = row["recomputed"] if row["recompute"] == RECOMPUTE.index("full") else 0.0
    product = prod(_degrees(choice).values())
    return sum(map(bool, on_host)), *on_host, again, row["schedule"], row["virtual"], product, choice.seconds


def _with_fewer_axes(choice: Choice, question: Question, constants: Constants) -> Choice:
    """The strategy without each axis whose removal costs no more than a tie. No other axis comes instead."""
    for axis in AXES:
        degrees = _degrees(choice)
        if degrees[axis] == 1 or axis in question.fix:
            continue
        without = {other: 1 for other, degree in degrees.items() if degree == 1 and other not in question.fix}
        asked = replace(question, fix={**question.fix, **without, axis: 1})
        found = within(asked, constants, choice.seconds * (1 + question.tie))
        if found is not None:
            return _with_fewer_axes(found, question, constants)
    return choice


def _plain(choice: Choice, question: Question, constants: Constants, most: float) -> Choice:
    """The plainest settings with a strategy's degrees and a step of at most so many seconds."""
    fixed: dict[str, Any] = {**question.fix, **_degrees(choice)}
    for options in _settings(question):
        for option in options:
            some = {name: value for name, value in option.items() if name not in question.fix}
            asked = replace(question, fix={**fixed, **some})
            found = within(asked, constants, most) if some else None
            if found is not None:
                choice, fixed = found, dict(asked.fix)
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
