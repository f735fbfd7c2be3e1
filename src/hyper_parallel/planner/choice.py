"""Results of the search: a strategy with its estimate, and the answer to a query."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyper_parallel.planner.codes import CODES
from hyper_parallel.planner.cost_model.step import Estimate
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.table import SPREAD, Table


@dataclass(frozen=True)
class Choice:
    """One strategy and what the model says of it."""

    table: Table
    """One row."""
    estimate: Estimate
    """Of that row."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(self.estimate.seconds.max())

    @property
    def peak(self) -> float:
        """Bytes of the fullest device."""
        return float(self.estimate.peak.max())

    @property
    def fits(self) -> bool:
        """Whether it runs within the device's memory."""
        return bool(self.estimate.fits.all())

    @property
    def spread(self) -> dict[str, float | str | tuple[str, ...]]:
        """The strategy's columns; codes by their names, degrees as whole numbers."""
        found: dict[str, float | str | tuple[str, ...]] = {}
        for name in SPREAD:
            value = float(getattr(self.table, name)[0])
            names = CODES.get(name)
            found[name] = names[int(value)] if names else int(value) if value.is_integer() else value
        return found


@dataclass(frozen=True)
class Answer:
    """The best strategies, and what the search did."""

    question: Question
    best: list[Choice]
    """Best first; empty where nothing fits."""
    counted: int
    """Legal points of the space."""
    pruned: dict[str, int]
    """Points that were left out, by the bound that excludes them; keys of PRUNED."""
    weighed: int
    """Points that were estimated."""
    bound: float
    """The objective is proved to be no better than this anywhere in the space: the best choice's own, as nothing was
    left out but by a bound. inf where nothing fits."""
    seconds: float
    """That the search took."""
    smallest: Choice | None = None
    """Where nothing fits: the strategy with the least memory."""
    ties: list[Choice] = field(default_factory=list)
    """Of each set of degrees whose step takes no more than a given share longer than the best, the best; best first."""

    @property
    def gap(self) -> float:
        """How far the best choice may be from the model's optimum, as a share; 0: it is the optimum."""
        return score(self.best[0], self.question) / self.bound - 1 if self.best else 0.0


def score(choice: Choice, question: Question) -> float:
    """What is minimised: seconds, bytes, or device seconds of a step."""
    if question.objective == "memory":
        return choice.peak
    return choice.seconds * (question.devices if question.objective == "cost" else 1)
