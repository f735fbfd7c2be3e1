"""The best strategies of a question: branch and bound over the space, with the forecast as the judge.

Choices are made level by level (`space`); at each level what cannot be among the best is left out by a bound that is
proved (`bounds`), with the number of points that it stands for. The search begins where the first bound is least, so
that what it finds early excludes much of the rest. For what lacks only what is computed again and what is moved, `kept`
finds the best way without listing them all. So the answer is the optimum of the model, and its gap is 0.

One strategy is told for each set of degrees (with data = replicate · shard), so that the ten best differ in more than
a code. Ties go to the smaller peak, then to the first in the order of columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel.errors import ConfigError
from hyper_parallel.plan.bounds import Bounds
from hyper_parallel.plan.constants import Constants
from hyper_parallel.plan.kept import Kept
from hyper_parallel.plan.model.step import Forecast, forecast
from hyper_parallel.plan.question import Question
from hyper_parallel.plan.space import Array, Columns, Counts, Mask, Space, taken
from hyper_parallel.plan.table import CODES, SPREAD, Table

CHUNK = 4096
"""Rows that are forecast at once: their columns stay in a core's cache."""
FIRST = 32
"""Rows of degrees and micro-batch that the search begins with; each later batch is twice as large."""

PRUNED = {
    "memory": "needs more memory than a device has, whatever is recomputed or moved to the host",
    "time": "cannot be faster than strategies that were found",
    "size": "cannot be smaller than strategies that were found",
    "kept": "recomputes or moves more than what fits does",
}
"""Why points were left out, by bound."""


@dataclass(frozen=True)
class Choice:
    """One strategy and what the model says of it."""

    table: Table
    """One row."""
    forecast: Forecast
    """Of that row."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(self.forecast.seconds.max())

    @property
    def peak(self) -> float:
        """Bytes of the fullest device."""
        return float(self.forecast.peak.max())

    @property
    def fits(self) -> bool:
        """Whether it runs within the device's memory."""
        return bool(self.forecast.fits.all())

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
    """Points that were forecast."""
    bound: float
    """The objective is proved to be no better than this anywhere in the space: the best choice's own, as nothing was
    left out but by a bound. inf where nothing fits."""
    seconds: float
    """That the search took."""
    smallest: Choice | None = None
    """Where nothing fits: the strategy with the least memory."""

    @property
    def gap(self) -> float:
        """How far the best choice may be from the model's optimum, as a share; 0: it is the optimum."""
        return score(self.best[0], self.question) / self.bound - 1 if self.best else 0.0


def score(choice: Choice, question: Question) -> float:
    """What is minimised: seconds, bytes, or device seconds of a step."""
    if question.objective == "memory":
        return choice.peak
    return choice.seconds * (question.devices if question.objective == "cost" else 1)


def answer(question: Question, constants: Constants) -> Answer:
    """The best strategies of a question; none where nothing fits, and then what takes the least memory.

    Raises ConfigError where no strategy is legal.
    """
    began = time.perf_counter()
    search = _Search(question, constants)
    best = search.run()
    if not search.counted:
        raise ConfigError(_nothing_legal(question))
    smallest = None
    if not best:
        smallest = _Search(replace(question, objective="memory", top=1), constants, bounded=False).run()[0]
    bound = score(best[0], question) if best else float("inf")
    took = time.perf_counter() - began
    return Answer(question, best, search.counted, search.pruned, search.weighed, bound, took, smallest)


def _nothing_legal(question: Question) -> str:
    work, shape = question.workload, question.workload.shape
    given = ", ".join(f"{name} {value}" for name, value in question.fix.items())
    return (
        f"no strategy spreads {shape.name} over {question.devices:,} devices with {work.batch:,} sequences of "
        f"{work.sequence:,} tokens{' and ' + given if given else ''}: degrees multiply to the devices, tensor divides "
        f"{shape.heads} heads, replicate · shard divides the batch, context the sequence, and a stage has a layer of "
        f"{shape.layers}; change the batch or the number of devices{', or fix less' if given else ''}"
    )


@dataclass
class _Found:
    """The best row of each set of degrees so far, and what is still worth looking at."""

    top: int
    by_memory: bool
    rows: dict[tuple[float, ...], tuple[tuple[float, ...], dict[str, float]]] = field(default_factory=dict)
    worst: tuple[float, float] = (float("inf"), float("inf"))
    """Seconds and bytes of the last of the best; in the other order where bytes are minimised."""

    def worth(self, seconds: Array, bytes: Array | None = None) -> Mask:
        """Which rows may be among the best, from bounds of their figures."""
        if not self.by_memory:
            return seconds < self.worst[0]
        assert bytes is not None
        least, late = self.worst
        return (bytes < least) | ((bytes <= least * (1 + 1e-9)) & (seconds < late))

    def add(self, rows: Columns, seconds: Array, bytes: Array) -> None:
        """Take in what is better than the last of the best."""
        some = np.flatnonzero(self.worth(seconds, bytes))
        if not some.size:
            return
        first, second = (bytes, seconds) if self.by_memory else (seconds, bytes)
        keys = np.stack([rows["replicate"] * rows["shard"], *(rows[name] for name in _DISTINCT)], axis=1)[
            some
        ]
        columns = [rows[name][some] for name in SPREAD]
        order = np.lexsort((*reversed(columns), second[some], first[some]))
        _, best = np.unique(keys[order], axis=0, return_index=True)
        for index in order[np.sort(best)]:
            at = some[index]
            row = {name: float(rows[name][at]) for name in SPREAD}
            rank = (float(first[at]), float(second[at]), *row.values())
            key = tuple(keys[index])
            if key not in self.rows or rank < self.rows[key][0]:
                self.rows[key] = (rank, row)
        ranks = sorted(rank for rank, _ in self.rows.values())
        if len(ranks) >= self.top:
            self.worst = ranks[self.top - 1][:2]  # type: ignore[assignment]
            self.rows = {key: one for key, one in self.rows.items() if one[0] <= ranks[self.top - 1]}

    def best(self) -> list[dict[str, float]]:
        """The rows, best first."""
        return [row for _, row in sorted(self.rows.values(), key=lambda one: one[0])[: self.top]]


_DISTINCT = ("pipeline", "tensor_x", "tensor_y", "context", "expert")
"""With the number of ranks that see other data: what tells the best strategies from each other."""


class _Search:
    """One search: what has been found, and what was left out."""

    def __init__(self, question: Question, constants: Constants, bounded: bool = True) -> None:
        """`bounded`: by the device's memory."""
        self.question, self.constants, self.bounded = question, constants, bounded
        self.space = Space(question)
        self.base = Table.of(
            question.workload, question.cluster, question.profile, devices=float(question.devices)
        )
        self.bounds = Bounds(self.space, self.base, constants)
        self.by_memory = question.objective == "memory"
        self.found = _Found(question.top, self.by_memory)
        self.counted = 0
        self.pruned = dict.fromkeys(PRUNED, 0)
        self.why = "size" if self.by_memory else "time"
        self.weighed = 0

    def run(self) -> list[Choice]:
        """The best, best first."""
        rows, points = self._listed()
        self.counted = int(points.sum())
        bound = self._smallest(rows) if self.by_memory else self.bounds.alone(rows)
        order = np.argsort(bound, kind="stable")
        start, size = 0, FIRST
        while start < order.size:
            some = order[start : start + size]
            # The bounds ascend: with the first of them all that follow are excluded.
            worth = (
                self._worth(np.zeros(some.size), bound[some]) if self.by_memory else self._worth(bound[some])
            )
            if not worth.any():
                self.pruned[self.why] += int(points[order[start:]].sum())
                break
            self._prune(points[some], worth)
            self._degrees(taken(rows, some[worth]))
            start, size = start + size, min(2 * size, CHUNK // 4)
        return [self._choice(row) for row in self.found.best()]

    def _listed(self) -> tuple[Columns, Counts]:
        """Rows of degrees and micro-batch that have points below them, and how many."""
        rows, _ = self.space.micro.expand(self.space.degrees())
        rows, _ = self.space.dual.expand(rows)
        points = self.space.counts(rows)
        return taken(rows, points > 0), points[points > 0]

    def _smallest(self, rows: Columns) -> Array:
        """Bytes at least, for each row of degrees and micro-batch."""
        least = np.full(rows["micro"].size, np.inf)
        for part in _chunks(least.size, CHUNK):
            split, parent = self.space.splits.expand(taken(rows, part))
            for piece in _chunks(parent.size, CHUNK):
                floor = self.bounds.floor(taken(split, piece))
                np.minimum.at(least, parent[piece] + part.start, floor)
        return least

    def _choice(self, row: Mapping[str, float]) -> Choice:
        table = self.base.replaced(**row)
        return Choice(table, forecast(table, self.constants))

    def _worth(self, seconds: Array, bytes: Array | None = None) -> Mask:
        return self.found.worth(seconds, bytes)

    def _prune(self, points: Counts, worth: Mask) -> None:
        self.pruned[self.why] += int(points[~worth].sum())

    def _degrees(self, rows: Columns) -> None:
        """All below rows of degrees and micro-batch."""
        split, parent = self.space.splits.expand(rows)
        below = self.space.kept_counts(rows) * self.space.schedules.counts(rows)
        under = (below * self.space.orders.counts(rows))[parent]
        floor = np.empty(parent.size)
        for part in _chunks(parent.size, CHUNK):
            floor[part] = self.bounds.floor(taken(split, part))
        held = self._within(floor)
        self.pruned["memory"] += int(under[~held].sum())
        split, parent, floor = taken(split, held), parent[held], floor[held]
        for part in _chunks(parent.size, CHUNK // 4):
            laid, inner = self.space.orders.expand(taken(split, part))
            weight, least = below[parent[part]][inner], floor[part][inner]
            for piece in _chunks(inner.size, CHUNK):
                self._laid(taken(laid, piece), weight[piece], least[piece])

    def _laid(self, rows: Columns, points: Counts, floor: Array) -> None:
        """All below rows with degrees, micro-batch, splits and order."""
        known = self.bounds.splits(rows)
        worth = self._worth(known.seconds, floor)
        self._prune(points, worth)
        index = np.flatnonzero(worth)
        index = index[np.argsort(known.seconds[index], kind="stable")]
        rows, known, floor = taken(rows, index), known.take(index), floor[index]
        for part in _chunks(index.size, CHUNK // 16):
            some, parent = self.space.schedules.expand(taken(rows, part))
            seconds = self.bounds.scheduled(some, known.take(part).take(parent))
            least = floor[part][parent]
            below = self.space.kept_counts(some)
            order = np.argsort(seconds, kind="stable")
            for piece in _chunks(order.size, CHUNK // 4):
                at = order[piece]
                worth = self._worth(seconds[at], least[at])
                self._prune(below[at], worth)
                at = at[worth]
                if at.size:
                    self._kept(taken(some, at), below[at], seconds[at])

    def _kept(self, rows: Columns, points: Counts, bound: Array) -> None:
        """Below rows that lack only what is computed again and what is moved."""
        kept = Kept(self.space, self.base, self.constants, self.bounded)
        best = kept.smallest(rows) if self.by_memory else kept.fastest(rows, bound, self.found.worst[0])
        self.weighed += best.weighed
        self.pruned["kept"] += int(points.sum()) - best.weighed
        self.found.add(best.rows, best.seconds, best.bytes)

    def _within(self, bytes: Array) -> Mask:
        k = self.constants.memory_constants
        fits: Mask = bytes * k.slack + k.outside <= self.base.capacity
        return fits | (not self.bounded)


def _chunks(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))
