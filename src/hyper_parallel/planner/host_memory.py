"""Host memory where it pays: each kind of bytes that a strategy moves saves time, or nothing fits without it.

    gain(kind) = 1 − t / t₀(kind),   t₀: the best strategy with nothing of this kind on the host        `moved_kinds`

by the closed forms, in which every other choice is free. A kind whose gain is below LEAST is left on the devices, that
of the smallest gain first, and the question is answered again.                                              `paying`
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hyper_parallel.planner import format
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search

LEAST = 0.02
"""Of the best step without it: what a kind of bytes on the host has to save."""
_WORDS = {"state": "optimizer state"}


@dataclass(frozen=True)
class MovedKind:
    """Bytes of one kind that lie on the host, in part or whole."""

    column: str
    """A key of ON_HOST."""
    gain: float | None
    """Share of the estimated step that it saves; None where nothing fits without it."""
    needs: str = ""
    """Memory of the smallest strategy without it, where nothing fits."""

    @property
    def name(self) -> str:
        """In words."""
        return _WORDS.get(ON_HOST[self.column], ON_HOST[self.column])

    @property
    def sentence(self) -> str:
        """Why it is there."""
        if self.gain is None:
            return (
                f"{self.name} on the host: nothing fits without (the smallest is estimated at {self.needs})"
            )
        if self.gain < 0:
            return f"{self.name} on the host: the best step without is {-self.gain:.0%} shorter, by estimate"
        return f"{self.name} on the host: saves {self.gain:.0%} of the best step without, by estimate"


def moved_kinds(question: Question, best: Figures, constants: Constants) -> list[MovedKind]:
    """What each kind that a question's strategy moves to the host gains; other keys stay fixed as they are."""
    found = []
    for column in ON_HOST:
        if not best.strategy[column]:
            continue
        without = search(replace(question, fix={**question.fix, column: 0.0}, top=1), constants)
        if without.best:
            found.append(MovedKind(column, 1 - best.seconds / without.best[0].seconds))
        else:
            assert without.smallest is not None, "a space with something on the host has the rest, too"
            found.append(MovedKind(column, None, format.memory(without.smallest)))
    return found


def paying(question: Question, constants: Constants) -> tuple[Question, Figures | None, list[MovedKind]]:
    """The question with kinds on the devices that do not pay on the host, its best strategy, None where nothing fits,
    and what that moves."""
    while True:
        found = search(replace(question, top=1), constants)
        if not found.best:
            return question, None, []
        moved = moved_kinds(question, found.best[0], constants)
        idle = [(one.gain, one.column) for one in moved if one.gain is not None and one.gain < LEAST]
        if not idle:
            return question, found.best[0], moved
        question = replace(question, fix={**question.fix, min(idle)[1]: 0.0})
