"""The overlap pass: candidate schedules are estimated, the best are simulated, the fastest is applied.

Tried are the usual schedule, and, each with the others: collectives in buckets or alone, one or two micro-batches side
by side, and how far collectives and kernels may run ahead. Each is priced by `arrange` (every collective alone on its
link). For the best of each number of micro-batches, collectives in pieces are tried on a few layers
(`overlap.chunk_counts`). The best few, and the step as it is, are simulated, where collectives share links. A rewrite
that does not pay is not made.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, lifetimes
from hyper_parallel.graph.collective_groups import is_collective, ranks_of
from hyper_parallel.graph.dependencies import reorder
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.lower import lower
from hyper_parallel.graph.pass_manager import SCHEDULE, validate
from hyper_parallel.graph.regions import region_of
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.overlap.chunk_counts import chunks_for
from hyper_parallel.overlap.chunked_matmul import NO_CHUNKS, WHOLE, Chunks
from hyper_parallel.overlap.fsdp_baseline_schedule import FsdpBaseline
from hyper_parallel.overlap.jobs import Jobs, Prices, jobs_of
from hyper_parallel.overlap.list_scheduling import Arranged, arrange
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Timeline
from hyper_parallel.units import format_bytes, format_seconds

log = logging.getLogger(__name__)

_AHEAD = (0.1, 1.0, 2.0, 4.0)
"""How far to run ahead, in layers' passes."""
_SIMULATED = 3
"""Of the tried ones, how many are simulated."""
_PAYS = 0.999
"""Of the step's time, what must be left at most: less gained than that is noise of the model."""


@dataclass(frozen=True)
class Tried:
    """A way to rewrite the step."""

    buckets: bool
    """Collectives of a layer made one."""
    together: int
    """Micro-batches side by side."""
    window: float
    """Seconds to run ahead at most."""
    seconds: float
    """Foreseen time of the step, every collective alone on its link."""
    bytes: int
    """Foreseen peak, with what is there from the start."""
    usual: bool = False
    """The usual schedule (`FsdpBaseline`)."""
    chunks: Chunks = NO_CHUNKS
    """Collectives in pieces."""

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
class Overlapped:
    """A step with its communication beside its computation."""

    step: StepGraph
    """The step as it was where `chosen` is None."""
    before: Timeline
    after: Timeline
    """Both simulated."""
    tried: tuple[Tried, ...]
    """By predicted time."""
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
    prices = Prices(cluster)
    known = balanced_sizes(step) if sizes is None else sizes
    resident = sum(life.bytes for life in lifetimes(step, known) if life.born < 0)
    before = simulated(step, cluster, known)
    device = cluster.device
    assert device is not None, "a cluster that prices has a device"
    room = memory if memory is not None else device.memory.bytes / device.memory.ranks
    candidates = _Candidates(step, prices, known, resident, max(room, before.peak.bytes))
    candidates.in_order()
    if pieces:
        candidates.in_pieces()
    best, chosen, after = step, None, before
    usual = FsdpBaseline()(step)
    timeline = simulated(usual, cluster, known)
    if timeline.step < before.step * _PAYS and timeline.peak.bytes <= candidates.room:
        # It needs little memory, and so is there where nothing else fits.
        chosen = Tried(False, 1, 0.0, timeline.step, timeline.peak.bytes, usual=True)
        best, after = usual, timeline
    found = sorted(candidates.found, key=lambda one: one.tried.rank)
    for one in found[:_SIMULATED]:
        candidate = one.step()
        timeline = simulated(candidate, cluster, known)
        if timeline.step < after.step * (_PAYS if chosen is None else 1.0):
            best, chosen, after = candidate, one.tried, timeline
    if chosen is not None:
        validate(step, best, chosen=True)
    return Overlapped(best, before, after, tuple(one.tried for one in found), chosen)


@dataclass(frozen=True)
class _Candidate:
    """An order that fits."""

    tried: Tried
    made: Arranged
    jobs: Jobs
    graph: StepGraph

    def step(self) -> StepGraph:
        """The step in this order."""
        free = [node for node in self.jobs.nodes if is_collective(node)]
        return reorder(self.graph, [self.jobs.nodes[index] for index in self.made.order], free)


@dataclass
class _Candidates:
    """The orders of a step that fit into `room` bytes, priced by `arrange`."""

    original: StepGraph
    prices: Prices
    sizes: Mapping[Any, int]
    resident: int
    """Bytes that are there from the start."""
    room: float
    found: list[_Candidate] = field(default_factory=list)

    def in_order(self) -> None:
        """Collectives whole: with and without buckets, one and two micro-batches at once, further and less ahead."""
        for bucketed in (False, True):
            graph = Buckets()(self.original) if bucketed else self.original
            jobs = jobs_of(graph, self.prices, self.sizes)
            unit = _layer_seconds(jobs)
            for together in range(1, min(2, jobs.lanes) + 1):
                for ahead in _AHEAD:
                    self._add(Tried(bucketed, together, ahead * unit, 0.0, 0), graph, jobs)
            if not any(one.tried.buckets == bucketed for one in self.found):
                # Micro-batches that fill each other's gaps hold too much: nothing runs further ahead than in one list.
                jobs = replace(jobs, jobs=tuple(replace(job, lane=0) for job in jobs.jobs), lanes=1)
                for ahead in _AHEAD:
                    self._add(Tried(bucketed, 1, ahead * unit, 0.0, 0), graph, jobs)

    def in_pieces(self) -> None:
        """Collectives in pieces, for the best of one and of two micro-batches at once."""
        for together in (1, 2):
            whole = [one.tried for one in self.found if one.tried.together == together]
            if not whole:
                continue
            best = min(whole, key=lambda tried: tried.rank)
            chunks = chunks_for(self.original, self.prices, self.sizes, together, best.window)
            # What pays on layers alone may not beside their neighbours, less so in the busier backward pass.
            for one in dict.fromkeys((chunks, replace(chunks, backward=WHOLE))):
                if one != NO_CHUNKS:
                    cut = one(self.original)
                    graph = Buckets()(cut) if best.buckets else cut
                    jobs = jobs_of(graph, self.prices, self.sizes)
                    for window in (best.window, best.window / 2):
                        self._add(replace(best, chunks=one, window=window), graph, jobs)

    def _add(self, tried: Tried, graph: StepGraph, jobs: Jobs) -> None:
        # Waits that come late cost least where links are shared; waits that come soon let go of memory.
        for patience in (math.inf, 1.0):
            made = arrange(
                jobs.jobs,
                window=tried.window,
                budget=self.room - self.resident,
                together=tried.together,
                slowdown=self.prices.slowdown,
                patience=patience,
            )
            held = made.bytes + self.resident
            if held <= self.room:
                self.found.append(
                    _Candidate(replace(tried, seconds=made.seconds, bytes=held), made, jobs, graph)
                )
                return


@dataclass(frozen=True)
class Overlap:
    """`overlap` as a pass."""

    cluster: Cluster
    memory: float | None = None
    pieces: bool = True

    name: str = "overlap"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({SCHEDULE, "overlap"})
    conflicts: frozenset[str] = frozenset({SCHEDULE})

    def __call__(self, step: StepGraph) -> StepGraph:
        """The rewritten step, or the same one where nothing pays; what was done is logged."""
        begun = time.perf_counter()
        found = overlap(step, self.cluster, memory=self.memory, pieces=self.pieces)
        log.info("%s\n  (found in %.1f s)", found, time.perf_counter() - begun)
        return found.step


def simulated(step: StepGraph, cluster: Cluster, sizes: Mapping[Any, int]) -> Timeline:
    """What a step would take where every rank runs it."""
    trace = lower({"all": step}, dict.fromkeys(ranks_of(step), "all"), sizes=sizes, views=False)
    return simulate(trace, cluster)


def _layer_seconds(jobs: Jobs) -> float:
    """What a layer takes in one direction when everything runs one after the other: the mean."""
    layers = {region_of(node).layer for node in jobs.nodes} - {""}
    lanes = [job.seconds for job in jobs.jobs if job.lane < jobs.lanes]
    return sum(lanes) / max(1, jobs.lanes) / max(1, len(layers)) / 2


def _percent(share: float | None) -> str:
    return "nothing is sent" if share is None else f"{share:.1%}"
