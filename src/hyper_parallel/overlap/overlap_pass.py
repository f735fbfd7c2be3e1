"""The overlap pass: the order of collectives is searched, and the best is applied.

The search (`overlap.order_search`) runs on a short step with few of the layers, where the step has one
(`StepGraph.short`): what is best for a few layers that are alike is best for many. What is left is made of the whole
step and simulated with it: it must fit, and pay. A rewrite that does not pay is not made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.overlap.order_search import OrderSearch, Room, Tried
from hyper_parallel.trace import Timeline
from hyper_parallel.units import format_bytes, format_seconds

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
    """Both simulated."""
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
        found = (made for one in search.best() if (made := whole.made(one.tried)) is not None)
    best = next((one for one in found if one.timeline.step < before.step * _PAYS), None)
    if best is None:
        return Overlapped(step, before, before, tuple(search.tried), None)
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
    requires: frozenset[str] = frozenset()
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
