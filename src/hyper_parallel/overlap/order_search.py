"""Search for the order of a step's collectives: candidates are estimated, and the best of them simulated.

Tried are the usual schedule, and, each with the others: collectives in buckets or alone, one or two micro-batches side
by side, and how far collectives and kernels may run ahead. Each is priced by `arrange` (every collective alone on its
link). For the best of each number of micro-batches, collectives in pieces are tried on a few layers
(`overlap.jobs`). The best few, and the step as it is, are simulated, where collectives share links.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dependencies import reorder
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.ir import is_collective, ranks_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.overlap.chunked_matmul import NO_CHUNKS, WHOLE, Chunks
from hyper_parallel.overlap.fsdp_baseline_schedule import FsdpBaseline
from hyper_parallel.overlap.jobs import Jobs, Priced, Prices, chunks_for, jobs_of
from hyper_parallel.overlap.list_scheduling import Arranged, arrange
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Timeline, Trace
from hyper_parallel.units import format_bytes, format_seconds

_AHEAD = (0.1, 1.0, 2.0, 4.0)
"""How far to run ahead, in layers' passes."""
_SIMULATED = 3
"""Of the tried ones, how many are simulated."""

Sizes = Mapping[Any, int]
"""Values of sizes that the data decide."""
Room = Callable[[int], float]
"""Bytes that a device may hold at once, in all, with these micro-batches side by side."""


@dataclass(frozen=True)
class Tried:
    """A way to rewrite a step."""

    buckets: bool
    """Collectives of a layer made one."""
    together: int
    """Micro-batches side by side."""
    window: float
    """Seconds to run ahead at most."""
    seconds: float
    """Predicted time of the step, every collective alone on its link."""
    bytes: int
    """Predicted peak, with what is there from the start."""
    usual: bool = False
    """The usual schedule (`FsdpBaseline`)."""
    chunks: Chunks = NO_CHUNKS
    """Collectives in pieces."""
    one_lane: bool = False
    """Micro-batches are one list: none fills another one's gaps."""

    @property
    def rank(self) -> tuple[float, int]:
        """The lowest is the best."""
        return self.seconds, self.bytes

    def __str__(self) -> str:
        if self.usual:
            return (
                "the usual schedule: weights asked for a layer ahead, gradients reduced beside the next layer"
            )
        buckets = "buckets" if self.buckets else "no buckets"
        beside = f"{self.together} micro-batches side by side" if self.together > 1 else "one after the other"
        pieces = f"; in pieces: {self.chunks}" if str(self.chunks) else ""
        return f"{buckets}, {beside}, at most {format_seconds(self.window)} ahead{pieces}"


@dataclass(frozen=True)
class Ordered:
    """A step in the order that was tried, and simulated."""

    tried: Tried
    step: StepGraph
    timeline: Timeline
    short: StepGraph | None = None
    """The short step in the same order, where it was tried on one."""


class OrderSearch:
    """The orders of a step that fit into `room`."""

    def __init__(self, step: StepGraph, cluster: Cluster, sizes: Sizes, pieces: bool = True) -> None:
        self.step, self._cluster, self._sizes, self._pieces = step, cluster, sizes, pieces
        self._prices, self._priced = Prices(cluster), Priced.of(step, sizes)
        self.resident = sum(life.bytes for life in self._priced.lives if life.born < 0)
        """Bytes that are there from the start."""
        self.room: Room = lambda _: math.inf
        self.tried: list[Tried] = []
        """By predicted time."""
        self._found: list[_Arranged] = []

    def as_it_is(self) -> Timeline:
        """The step in the order that it has."""
        return self._timeline(self.step, self._priced)

    def best(self) -> list[Ordered]:
        """The usual schedule and the best of the others, by their simulated time."""
        self._in_order()
        if self._pieces:
            self._in_pieces()
        self._found.sort(key=lambda one: one.tried.rank)
        self.tried = [one.tried for one in self._found]
        orders = [*self._usual(), *(self._simulated(one) for one in self._found[:_SIMULATED])]
        return sorted(orders, key=lambda one: one.timeline.step)

    def made(self, tried: Tried) -> Ordered | None:
        """The step in an order that was tried on another one; None where it does not fit."""
        if tried.usual:
            return next(self._usual(), None)
        found = self._arranged(tried, self.jobs(tried), self._budget(tried))
        return None if found is None else self._simulated(found)

    def reordered(self, tried: Tried) -> StepGraph:
        """The step in an order that was tried on another one, whatever it holds."""
        if tried.usual:
            return FsdpBaseline()(self.step)
        found = self._arranged(tried, self.jobs(tried), math.inf)
        assert found is not None
        return found.reordered()

    def _usual(self) -> Iterator[Ordered]:
        """The usual schedule. It needs little memory, and so is there where nothing else fits."""
        step = FsdpBaseline()(self.step)
        timeline = self._timeline(step, self._priced)
        if timeline.peak.bytes <= self.room(1):
            yield Ordered(
                Tried(False, 1, 0.0, timeline.step, timeline.peak.bytes, usual=True), step, timeline
            )

    def _in_order(self) -> None:
        """Collectives whole: with and without buckets, one and two micro-batches at once, further and less ahead."""
        for bucketed in (False, True):
            plain = Tried(bucketed, 1, 0.0, 0.0, 0)
            jobs = self.jobs(plain)
            unit = _layer_seconds(jobs)
            for together in range(1, min(2, jobs.lanes) + 1):
                self._add(jobs, *(replace(plain, together=together, window=ahead * unit) for ahead in _AHEAD))
            if not any(one.tried.buckets == bucketed for one in self._found):
                # Micro-batches that fill each other's gaps hold too much: nothing runs further ahead than in one list.
                plain = replace(plain, one_lane=True)
                self._add(_one_lane(jobs), *(replace(plain, window=ahead * unit) for ahead in _AHEAD))

    def _in_pieces(self) -> None:
        """Collectives in pieces, for the best of one and of two micro-batches at once."""
        for together in (1, 2):
            whole = [one.tried for one in self._found if one.tried.together == together]
            if not whole:
                continue
            best = min(whole, key=lambda tried: tried.rank)
            chunks = chunks_for(self.step, self._prices, self._sizes, together, best.window)
            # What pays on layers alone may not beside their neighbours, less so in the busier backward pass.
            for one in dict.fromkeys((chunks, replace(chunks, backward=WHOLE))):
                if one != NO_CHUNKS:
                    cut = replace(best, chunks=one, one_lane=False)
                    self._add(self.jobs(cut), replace(cut, window=best.window / 2), cut)

    def jobs(self, tried: Tried) -> Jobs:
        """The jobs of the step rewritten in this way, in the order of the model's code."""
        graph = tried.chunks(self.step) if tried.chunks != NO_CHUNKS else self.step
        of = self._priced
        if tried.buckets:
            # Only collectives become others, with other names.
            known = None if graph is not self.step else of.costs
            of = Priced.of(Buckets()(graph), self._sizes, known)
        elif graph is not self.step:
            of = Priced.of(graph, self._sizes)
        jobs = jobs_of(of, self._prices)
        return _one_lane(jobs) if tried.one_lane else jobs

    def _add(self, jobs: Jobs, *ways: Tried) -> None:
        """Add the ways that fit; each runs further ahead than the one before it, and so holds more."""
        for one in ways:
            found = self._arranged(one, jobs, self._budget(one))
            if found is None:
                break
            self._found.append(found)

    def held(self, tried: Tried, jobs: Jobs, room: float, resident: float) -> float | None:
        """Bytes that other jobs hold at most in an order that was tried on those of this step, of which `resident` are
        there from the start; None where they hold more than `room`."""
        found = self._arranged(tried, jobs, room - resident)
        return None if found is None else found.made.bytes + resident

    def _budget(self, tried: Tried) -> float:
        return self.room(tried.together) - self.resident

    def _arranged(self, tried: Tried, jobs: Jobs, budget: float) -> _Arranged | None:
        # Waits that come late cost least where links are shared; waits that come soon let go of memory.
        for patience in (math.inf, 1.0):
            arranged = arrange(
                jobs.jobs,
                window=tried.window,
                budget=budget,
                together=tried.together,
                slowdown=self._prices.slowdown,
                patience=patience,
            )
            if arranged.bytes <= budget:
                held = arranged.bytes + self.resident
                return _Arranged(replace(tried, seconds=arranged.seconds, bytes=held), arranged, jobs)
        return None

    def _simulated(self, found: _Arranged) -> Ordered:
        step = found.reordered()
        return Ordered(found.tried, step, self._timeline(step, found.jobs.of))

    def _timeline(self, step: StepGraph, of: Priced) -> Timeline:
        """What a step would take where every rank runs it: a priced one, or the same nodes in another order."""
        priced = {node: of.costs[node.name] for node in step.nodes if node.name in of.costs}
        lives = of.lives if step is of.step else None
        one = lowered(step, sizes=self._sizes, views=False, priced=priced, lives=lives)
        classes = dict.fromkeys(ranks_of(step), "all")
        return simulate(Trace({"all": one.ops}, classes, {"all": one.resident}), self._cluster)


@dataclass(frozen=True)
class _Arranged:
    """An order that fits."""

    tried: Tried
    made: Arranged
    jobs: Jobs

    def reordered(self) -> StepGraph:
        """The step in this order."""
        nodes = self.jobs.nodes
        free = [node for node in nodes if is_collective(node)]
        return reorder(self.jobs.of.step, [nodes[index] for index in self.made.order], free, self.jobs.needs)


def _one_lane(jobs: Jobs) -> Jobs:
    return replace(jobs, jobs=tuple(replace(job, lane=0) for job in jobs.jobs), lanes=1)


def _layer_seconds(jobs: Jobs) -> float:
    """Seconds of a layer in one direction when everything runs one after the other: the mean."""
    layers = {region_of(node).layer for node in jobs.nodes} - {""}
    lanes = [job.seconds for job in jobs.jobs if job.lane < jobs.lanes]
    return sum(lanes) / max(1, jobs.lanes) / max(1, len(layers)) / 2


# The overlap pass: the order of collectives is searched, and the best is applied.
#
# The search runs on a short step with few of the layers, where the step has one
# (`StepGraph.short`): what is best for a few layers that are alike is best for many. What is left is made of the whole
# step and simulated with it: it must fit, and pay. A rewrite that does not pay is not made.

log = logging.getLogger(__name__)

_PAYS = 0.999
"""Of the step's time, what must be left at most: less gained than that is noise of the model."""


@dataclass(frozen=True)
class Overlapped:
    """A step with its communication beside its computation."""

    step: StepGraph
    """The step as it was where `chosen` is None."""
    before: Timeline
    after: Timeline
    tried: tuple[Tried, ...]
    """By predicted time, which is that of the short step where there is one."""
    chosen: Tried | None

    def __str__(self) -> str:
        lines = [f"overlap, simulated on {self.before.cluster or self.before.device}:"]
        lines.append(f"  {self.chosen}" if self.chosen else "  nothing pays; the step stays as it is")
        for word, timeline in (("before", self.before), ("after", self.after)):
            masked = timeline.masked
            lines.append(
                f"  {word:7s} step {format_seconds(timeline.step)}, masked {_percent(masked.blocked)} by blocked time, "
                f"{_percent(masked.end_to_end)} end to end, peak {format_bytes(timeline.peak.bytes)}"
            )
        return "\n".join(lines)


def overlap(
    step: StepGraph,
    cluster: Cluster,
    *,
    memory: float | None = None,
    sizes: Mapping[Any, int] | None = None,
    pieces: bool = True,
) -> Overlapped:
    """The step rewritten for a cluster, and what that is predicted to bring.

    `memory`: bytes that a device may hold at once, in all; left out, what the device has. A step that already holds
    more may go on holding as much. `sizes`: values of sizes that the data decide; left out, rows spread evenly.
    `pieces`: collectives may go in pieces, with which results are equal up to rounding where a kernel sums in another
    order for another number of rows or columns; without, they are equal bit for bit.

    The result depends on these arguments alone. Every rank must give the same, or their collectives do not meet.
    """
    device = cluster.device
    assert device is not None, "a cluster that prices has a device"
    given = memory if memory is not None else device.memory.bytes / device.memory.ranks
    whole = OrderSearch(step, cluster, balanced_sizes(step) if sizes is None else sizes, pieces)
    before = whole.as_it_is()
    room = max(given, before.peak.bytes)
    whole.room = lambda _: room
    # Sizes that are given are those of the whole step.
    if step.short is None or sizes is not None:
        search, found = whole, iter(whole.best())
    else:
        short = step.short()
        search = OrderSearch(short, cluster, balanced_sizes(short), pieces)
        search.room = _room_of_short(search, whole, before, room)
        found = (
            replace(made, short=one.step)
            for one in search.best()
            if (made := whole.made(one.tried)) is not None
        )
    best = next((one for one in found if one.timeline.step < before.step * _PAYS), None)
    if best is None:
        return Overlapped(step, before, before, tuple(search.tried), None)
    if (few := best.short) is not None:
        best.step.short = lambda: few
    return Overlapped(best.step, before, best.timeline, tuple(search.tried), best.tried)


def _room_of_short(short: OrderSearch, whole: OrderSearch, before: Timeline, room: float) -> Room:
    """The room that is left to the short step where the other layers hold what they hold in the step as it is: each
    micro-batch that runs beside others as much again."""
    resident = whole.resident - short.resident
    held = before.peak.bytes - short.as_it_is().peak.bytes - resident
    return lambda together: room - resident - held * together


@dataclass(frozen=True)
class Overlap:
    """`overlap` as a pass."""

    cluster: Cluster
    memory: float | None = None
    pieces: bool = True

    name: str = "overlap"
    provides: frozenset[str] = frozenset({SCHEDULE, "overlap"})
    conflicts: frozenset[str] = frozenset({SCHEDULE})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The rewritten step, or the same one where nothing pays; what was done is logged."""
        begun = time.perf_counter()
        found = overlap(step, self.cluster, memory=self.memory, pieces=self.pieces)
        log.info("%s\n  (found in %.1f s)", found, time.perf_counter() - begun)
        return found.step


def _percent(share: float | None) -> str:
    return "nothing is sent" if share is None else f"{share:.1%}"
