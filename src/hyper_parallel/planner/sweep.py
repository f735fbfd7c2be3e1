"""Sweeps: one query over numbers of devices or sequence lengths, and the smallest cluster that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.choice import Answer
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.query import LARGEST_CLUSTER, Question
from hyper_parallel.planner.simplest import simplest

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """A question, and its answer."""

    question: Question
    answer: Answer | None
    """None where no strategy is legal."""
    reason: str = ""
    """Why there is none that fits, or that is legal."""

    @property
    def fits(self) -> bool:
        """Whether some strategy fits."""
        return self.answer is not None and bool(self.answer.best)


def ask(question: Question, constants: Constants) -> Point:
    """Answer a question for which there may be no legal strategy."""
    try:
        found, _ = simplest(question, constants)
    except ConfigError as error:
        return Point(question, None, str(error))
    if found.best:
        return Point(question, found)
    return Point(question, found, "no strategy fits")


def curve(
    questions: Iterable[Question], constants: Constants, progress: Progress | None = None
) -> list[Point]:
    """The answers, in order."""
    found = []
    asked = list(questions)
    for place, question in enumerate(asked, 1):
        if progress is not None:
            which = f" ({place} of {len(asked)})" if len(asked) > 1 else ""
            progress(f"{question.devices:,} devices, {question.workload.sequence:,} tokens a sequence{which}")
        found.append(ask(question, constants))
    return found


def fewest(question: Question, constants: Constants, progress: Progress | None = None) -> Point | None:
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
