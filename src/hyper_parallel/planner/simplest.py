"""The simplest of the strategies that tie: of estimates that the cost model cannot tell apart, which to show first.

On published runs the cost model is off by several times `TIE` (docs/fidelity.md). So strategies whose estimated steps
are within `TIE` of the quickest one are equal, and the one that asks for the least comes first:

1. the fewest axes beside data (replicate and shard), a second tensor axis counting as one more; of these none with
   context, and the smallest degrees. An axis whose removal costs no more than `TIE` goes too, so that each axis of the
   answer pays for itself;
2. with those degrees, and within the tie of what they take at least, in this order: nothing in the host's memory; less
   recomputed; 1F1B before other schedules; axes laid in the usual order; weights shared among all data ranks, or those
   of a node.

Each step is a separate search, limited to what ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.planner.choice import Answer, Choice
from hyper_parallel.planner.codes import SCHEDULES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer, within

TIE = 0.02
"""A share of a step; estimates of one model and cluster that differ by less count as equal."""

AXES = ("context", "tensor_y", "pipeline", "expert", "tensor_x")
"""Axes beside data, what is given up first in front."""


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
    first, fewer = None, _with_fewer_axes(min(found.ties, key=_axes), question, constants)
    while fewer is not first:
        first = _plain(fewer, question, constants, max(fewer.seconds, quickest.seconds * (1 + question.tie)))
        fewer = _with_fewer_axes(first, question, constants)
    others = [one for one in found.best if _degrees(one) != _degrees(first)]
    return replace(found, best=[first, *others][: question.top]), Tied(quickest, len(found.ties))


def _degrees(choice: Choice) -> dict[str, float]:
    return {axis: float(getattr(choice.table, axis)[0]) for axis in AXES}


def _axes(choice: Choice) -> tuple[float, ...]:
    """How much the degrees of a strategy ask for."""
    degrees = _degrees(choice)
    product = 1.0
    for degree in degrees.values():
        product *= degree
    return sum(degree > 1 for degree in degrees.values()), degrees["context"] > 1, product, choice.seconds


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
    yield [{"order": 0}]
    node = question.cluster.node
    yield [{"replicate": 1}, *([{"shard": node}] if node else [])]
