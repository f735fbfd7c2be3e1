"""Branch and bound over the strategy space, with the cost model as the objective.

Choices are made level by level (`space`). At each level a proved bound (`lower_bounds`) prunes rows that cannot be
among the best, and the search counts the points that it prunes. The search begins with the least bound, so that good
strategies found early prune much of the rest. Where only recompute and offload are open, `memory_choices` finds the
best way without enumerating all. So the answer is the optimum of the model, and its gap is 0.

The search reports one strategy for each set of degrees (with data = replicate · shard), so that the ten best differ in
more than a code. A strategy therefore also has to be faster than the best one known with its degrees. Ties go to fewer
axes, of as many to those without context, then to the smaller peak, then to the first in the order of columns. Of ties
that differ only in data and context, the search reports one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import CHUNK, Array, Columns, Counts, Mask, chunks, taken, unique
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.lower_bounds import Bounds
from hyper_parallel.planner.memory_choices import Index, MemoryChoice
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.space import DEGREES, StrategySpace
from hyper_parallel.planner.table import SPREAD, Table

EQUAL = 1e-9
"""Figures that differ by less, as a share, are equal."""
BATCH = 2048
"""The least number of rows for which the best memory choices are found at once."""
DIVE, ALIKE = 1024, 4
"""Before the search begins it estimates one strategy for each of DIVE rows of degrees and micro-batch, with at most
ALIKE rows of the same degrees."""
FIRST = 32
"""Rows of degrees and micro-batch that the search begins with; each later batch is twice as large."""

PRUNED = {
    "memory": "needs more memory than a device has, whatever is recomputed or moved to the host",
    "time": "cannot be faster than strategies that were found",
    "size": "cannot be smaller than strategies that were found",
    "kept": "recomputes or moves more than what fits does",
}
"""Why points were left out, by bound."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best strategies of a question, and what the search did."""

    question: Question
    best: Sequence[Figures] = ()
    """Best first; empty where nothing fits."""
    counted: int = 0
    """Legal points of the space."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Points that were left out, by the bound that excludes them; keys of PRUNED."""
    weighed: int = 0
    """Points that were estimated."""
    bound: float = np.inf
    """The objective is proved to be no better than this anywhere in the space: the best strategy's own, as nothing was
    left out but by a bound. inf where nothing fits."""
    seconds: float = 0.0
    """That the search took."""
    smallest: Figures | None = None
    """Where nothing fits: the strategy with the least memory."""
    ties: Sequence[Figures] = ()
    """Of each set of degrees whose step takes no more than a given share longer than the best, the best; best first."""
    quickest: Figures | None = None
    """The quickest of `ties`, where the simplest of them comes first (`solve.simplest`)."""
    reason: str = ""
    """Why none of the strategies fits, or none is legal (`solve.ask`)."""

    @property
    def fits(self) -> bool:
        """Whether some strategy fits."""
        return bool(self.best)

    @property
    def gap(self) -> float:
        """How far the best strategy may be from the model's optimum, as a share; 0: it is the optimum."""
        return score(self.best[0], self.question) / self.bound - 1 if self.best else 0.0


def score(found: Figures, question: Question) -> float:
    """The figure that is minimised: seconds, bytes, or device seconds of a step."""
    if question.objective == "memory":
        return found.peak
    return found.seconds * (question.devices if question.objective == "cost" else 1)


def search(question: Question, constants: Constants, tie: float = 0.0) -> SearchResult:
    """The best strategies of a question; none where nothing fits, and then what takes the least memory.

    `tie`: a share of the best step's time; `SearchResult.ties` has each set of degrees whose step takes at most that
    much longer. Raises ConfigError where no strategy is legal.
    """
    began = time.perf_counter()
    branches = _Search(question, constants, tie=tie)
    best = branches.run()
    if not branches.counted:
        raise ConfigError(_nothing_legal(question))
    smallest = None
    if not best:
        smallest = _Search(replace(question, objective="memory", top=1), constants, bounded=False).run()[0]
    return SearchResult(
        question=question,
        best=best,
        counted=branches.counted,
        pruned=branches.pruned,
        weighed=branches.weighed,
        bound=score(best[0], question) if best else np.inf,
        seconds=time.perf_counter() - began,
        smallest=smallest,
        ties=branches.ties() if tie else (),
    )


def within(question: Question, constants: Constants, seconds: float) -> Figures | None:
    """The quickest strategy of a question whose step takes at most `seconds`; None where there is none."""
    branches = _Search(replace(question, top=1), constants, most=seconds)
    return next(iter(branches.run()), None)


def _nothing_legal(question: Question) -> str:
    work, shape = question.workload, question.workload.shape
    given = ", ".join(f"{name} {value}" for name, value in question.fix.items() if name not in ON_HOST)
    return (
        f"no strategy spreads {shape.name} over {question.devices:,} devices with {work.batch:,} sequences of "
        f"{work.sequence:,} tokens{' and ' + given if given else ''}: degrees multiply to the devices, tensor divides "
        f"{shape.heads} heads, replicate · shard divides the batch, context the sequence, and a stage has a layer of "
        f"{shape.layers}; change the batch or the number of devices{', or fix less' if given else ''}"
    )


class _Best:
    """The best row of each set of degrees so far, and what is still worth looking at."""

    def __init__(self, top: int, by_memory: bool, kinds: int, most: float = np.inf, tie: float = 0.0) -> None:
        """`kinds`: how many sets of degrees there are; rows say in a column `kind` which they have. `most`: seconds
        that a step may take. `tie`: rows are kept whose step takes at most this share longer than the best."""
        self.top, self.by_memory, self.tie = top, by_memory, tie
        self.rows: dict[int, tuple[tuple[float, ...], dict[str, float]]] = {}
        self.own: Array = np.full(kinds, np.inf)
        """Seconds of the best of each set of degrees."""
        self.worst: tuple[float, float] = (most, float("inf"))
        """Seconds of the last of the best; its bytes and seconds where bytes are minimised."""

    def limit(self, rows: Columns) -> Array:
        """Seconds from which on rows are no better than what was found, here or with the same degrees. [n]"""
        found: Array = np.minimum(self.worst[0], self.own[rows["kind"].astype(np.intp)]) * (1 + 2 * EQUAL)
        return found

    def worth(self, rows: Columns, seconds: Array, bytes: Array) -> Mask:
        """Whether each row may be among the best, from bounds of their figures."""
        if not self.by_memory:
            return seconds < self.limit(rows)
        least, late = self.worst
        return (bytes < least) | ((bytes <= least * (1 + EQUAL)) & (seconds < late))

    def add(self, rows: Columns, seconds: Array, bytes: Array) -> None:
        """Take in what is better than the last of the best."""
        some = np.flatnonzero(self.worth(rows, seconds, bytes))
        if not some.size:
            return
        rows, seconds, bytes = taken(rows, some), _even(seconds[some]), bytes[some]
        several = sum(((rows[name] > 1).astype(np.float64) for name in DEGREES), np.zeros(some.size))
        # Of as many axes, those ask for less that split no sequence.
        several = several + 0.5 * (rows["context"] > 1)
        ranks = [bytes, seconds, several] if self.by_memory else [seconds, several, bytes]
        ranks += [rows[name] for name in SPREAD]
        order = np.lexsort(ranks[::-1])
        _, best = np.unique(rows["kind"][order], return_index=True)
        for at in order[best]:
            kind, rank = int(rows["kind"][at]), tuple(float(column[at]) for column in ranks)
            if kind not in self.rows or rank < self.rows[kind][0]:
                self.rows[kind] = (rank, {name: float(rows[name][at]) for name in SPREAD})
                self.own[kind] = seconds[at]
        # Of rows that differ only in the axes that split tokens, the search reports at most one.
        shares: dict[tuple[float, ...], tuple[float, ...]] = {}
        for rank, row in sorted(self.rows.values(), key=lambda one: one[0]):
            shares.setdefault(_split(row), rank)
        if len(shares) >= self.top:
            first, last = next(iter(shares.values())), list(shares.values())[self.top - 1]
            self.worst = max(last[:2], (first[0] * (1 + self.tie), 0.0))  # type: ignore[assignment]
            self.rows = {kind: one for kind, one in self.rows.items() if one[0][0] <= self.worst[0]}

    def best(self) -> list[dict[str, float]]:
        """The rows, best first; of equally good rows that differ only in the axes that split tokens, the first."""
        figures: dict[tuple[float, ...], dict[str, float]] = {}
        for rank, row in sorted(self.rows.values(), key=lambda one: one[0]):
            figures.setdefault((*rank[: 1 + self.by_memory], *_split(row)), row)
        return list(figures.values())[: self.top]

    def ties(self) -> list[dict[str, float]]:
        """The rows whose step takes at most `tie` longer than the best, of each set of degrees the best."""
        ranked = sorted(self.rows.values(), key=lambda one: one[0])
        return [row for rank, row in ranked if rank[0] <= ranked[0][0][0] * (1 + self.tie)]


def _split(row: Mapping[str, float]) -> tuple[float, ...]:
    """Degrees of a strategy, ranks that see other tokens taken together."""
    return tuple(row[name] for name in ("pipeline", "tensor_x", "tensor_y", "expert"))


def _even(seconds: Array) -> Array:
    """Rounded, so that sums of the same in another order are equal."""
    grain = EQUAL * 10.0 ** np.ceil(np.log10(seconds))
    found: Array = np.round(seconds / grain) * grain
    return found


_DISTINCT = ("data", "pipeline", "tensor_x", "tensor_y", "context", "expert")
"""What tells the best strategies from each other."""


class _Search:
    """One search: what has been found, and what was left out."""

    def __init__(
        self,
        question: Question,
        constants: Constants,
        bounded: bool = True,
        most: float = np.inf,
        tie: float = 0.0,
    ) -> None:
        """`bounded`: by the device's memory. `most`, `tie`: as of `_Best`."""
        self.question, self.constants, self.bounded = question, constants, bounded
        self.most, self.tie = most, tie
        self.space = StrategySpace(question)
        self.base = Table.of(
            question.workload, question.cluster, question.profile, devices=float(question.devices)
        )
        self.bounds = Bounds(self.space, self.base, constants, bounded)
        self.by_memory = question.objective == "memory"
        self.counted = 0
        self.pruned = dict.fromkeys(PRUNED, 0)
        self.why = "size" if self.by_memory else "time"
        self.weighed = 0
        self.waiting: list[tuple[Columns, Counts]] = []
        """Rows that lack only what is computed again and moved, and their points."""

    def run(self) -> list[Figures]:
        """The best, best first."""
        rows, points = self._listed()
        self.counted = int(points.sum())
        first, kind = unique({name: rows[name].astype(np.float64) for name in _DISTINCT})
        rows["kind"] = kind.astype(np.float64)
        self.found = _Best(self.question.top, self.by_memory, first.size, self.most, self.tie)
        bound = self._smallest(rows) if self.by_memory else self.bounds.alone(rows)
        order = np.argsort(bound, kind="stable")
        if not self.by_memory:
            self._begin(rows, order)
        start, size = 0, FIRST
        while start < order.size:
            some = order[start : start + size]
            # The bounds ascend: with the first of them all that follow are excluded.
            least = np.zeros(some.size) if self.by_memory else bound[some]
            worth = self.found.worth(taken(rows, some), least, bound[some])
            if not self._ahead(float(bound[some[0]])):
                self.pruned[self.why] += int(points[order[start:]].sum())
                break
            self._prune(points[some], worth)
            self._degrees(taken(rows, some[worth]))
            self._flush()
            start, size = start + size, min(2 * size, CHUNK // 4)
        return [self._figures(row) for row in self.found.best()]

    def ties(self) -> list[Figures]:
        """The strategies that tie with the best, best first."""
        return [self._figures(row) for row in self.found.ties()]

    def _listed(self) -> tuple[Columns, Counts]:
        """Rows of degrees and micro-batch that have points below them, and how many."""
        rows, _ = self.space.micro.expand(self.space.degrees())
        rows, _ = self.space.dual.expand(rows)
        points = self.space.counts(rows)
        rows["data"] = rows["replicate"] * rows["shard"]
        return taken(rows, points > 0), points[points > 0]

    def _smallest(self, rows: Columns) -> Array:
        """Bytes at least, for each row of degrees and micro-batch."""
        least = np.full(rows["micro"].size, np.inf)
        for part in chunks(least.size):
            split, parent = self.space.splits.expand(taken(rows, part))
            for piece in chunks(parent.size):
                floor, _ = self.bounds.floor(taken(split, piece))
                np.minimum.at(least, parent[piece] + part.start, floor)
        return least

    def _figures(self, row: Mapping[str, float]) -> Figures:
        table = self.base.replaced(**row)
        return figures(table, estimate(table, self.constants))[0]

    def _ahead(self, bound: float) -> bool:
        """Whether anything with this bound may be among the best, whatever its degrees."""
        return bound <= self.found.worst[0] * (1 + 2 * EQUAL)

    def _prune(self, points: Counts, worth: Mask) -> None:
        self.pruned[self.why] += int(points[~worth].sum())

    def _begin(self, rows: Columns, order: Index) -> None:
        """Find likely strategies, so that the search begins with a limit; `order` has the least bound first."""
        kind = rows["kind"][order]
        together = np.argsort(kind, kind="stable")
        first = np.flatnonzero(np.diff(kind[together], prepend=-1.0))
        place = np.arange(kind.size) - np.repeat(first, np.diff(first, append=kind.size))
        few = np.sort(together[place < ALIKE])[:DIVE]
        self._dive(taken(rows, order[few]))
        # Of the best degrees all micro-batches.
        self._dive(taken(rows, order[np.isin(kind, list(self.found.rows))][:DIVE]))

    def _dive(self, rows: Columns) -> None:
        """Take in a likely strategy of each of these degrees."""
        split, parent = self.space.splits.expand(rows)
        floor, again = self.bounds.floor(split)
        index = np.flatnonzero(self._within(floor))
        laid, inner = self.space.orders.expand(taken(split, index))
        known = self.bounds.splits(laid, again[index][inner])
        index = _least(parent[index][inner], known.seconds)
        some, inner = self.space.schedules.expand(taken(laid, index))
        seconds = self.bounds.scheduled(some, known.take(index).take(inner))
        index = _least(inner, seconds)
        kept = MemoryChoice(self.space, self.base, self.constants, self.bounded)
        best = kept.fastest(taken(some, index), seconds[index], np.full(index.size, np.inf))
        self.found.add(best.rows, best.seconds, best.bytes)

    def _degrees(self, rows: Columns) -> None:
        """All below rows of degrees and micro-batch."""
        split, parent = self.space.splits.expand(rows)
        below = self.space.kept_counts(rows) * self.space.schedules.counts(rows)
        under = (below * self.space.orders.counts(rows))[parent]
        floor, again = np.empty(parent.size), np.empty(parent.size)
        for part in chunks(parent.size):
            floor[part], again[part] = self.bounds.floor(taken(split, part))
        held = self._within(floor)
        self.pruned["memory"] += int(under[~held].sum())
        split, parent, floor, again = taken(split, held), parent[held], floor[held], again[held]
        for part in chunks(parent.size, CHUNK // 4):
            laid, inner = self.space.orders.expand(taken(split, part))
            weight, least, more = below[parent[part]][inner], floor[part][inner], again[part][inner]
            for piece in chunks(inner.size):
                self._laid(taken(laid, piece), weight[piece], least[piece], more[piece])

    def _laid(self, rows: Columns, points: Counts, floor: Array, again: Array) -> None:
        """All below rows with degrees, micro-batch, splits and order."""
        known = self.bounds.splits(rows, 0.0 if self.by_memory else again)
        worth = self.found.worth(rows, known.seconds, floor)
        self._prune(points, worth)
        index = np.flatnonzero(worth)
        index = index[np.argsort(known.seconds[index], kind="stable")]
        rows, known, floor = taken(rows, index), known.take(index), floor[index]
        for part in chunks(index.size, CHUNK // 16):
            some, parent = self.space.schedules.expand(taken(rows, part))
            seconds = self.bounds.scheduled(some, known.take(part).take(parent))
            least = floor[part][parent]
            below = self.space.kept_counts(some)
            order = np.argsort(seconds, kind="stable")
            for piece in chunks(order.size, CHUNK // 4):
                at = order[piece]
                worth = self.found.worth(taken(some, at), seconds[at], least[at])
                self._prune(below[at], worth)
                at = at[worth]
                if at.size:
                    self._kept(taken(some, at), below[at], seconds[at], least[at])

    def _kept(self, rows: Columns, points: Counts, bound: Array, least: Array) -> None:
        """Below rows that lack only what is computed again and what is moved; some at a time."""
        self.waiting.append(({**rows, "bound": bound, "least": least}, points))
        if sum(points.size for _, points in self.waiting) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        """All below the rows that wait."""
        if not self.waiting:
            return
        names = self.waiting[0][0]
        rows = {name: np.concatenate([some[name] for some, _ in self.waiting]) for name in names}
        points = np.concatenate([points for _, points in self.waiting])
        self.waiting = []
        worth = self.found.worth(rows, rows["bound"], rows["least"])
        self._prune(points, worth)
        rows, points = taken(rows, worth), points[worth]
        if not points.size:
            return
        kept = MemoryChoice(self.space, self.base, self.constants, self.bounded)
        best = (
            kept.smallest(rows)
            if self.by_memory
            else kept.fastest(rows, rows["bound"], self.found.limit(rows))
        )
        self.weighed += best.weighed
        self.pruned["kept"] += int(points.sum()) - best.weighed
        self.found.add(best.rows, best.seconds, best.bytes)

    def _within(self, bytes: Array) -> Mask:
        fits: Mask = bytes <= self.constants.usable(self.base.capacity)
        return fits | (not self.bounded)


def _least(of: Counts, seconds: Array) -> Index:
    """The row with the least seconds of each of what rows are `of`."""
    order = np.lexsort((seconds, of))
    _, first = np.unique(of[order], return_index=True)
    return order[first]
