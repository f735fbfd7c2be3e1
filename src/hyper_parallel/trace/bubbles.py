"""Bubbles: time in which a rank computes nothing, by cause.

A rank is idle while none of its kernels runs. The cause of an idle period is found by going back from the kernel that
ends it, at each op to the predecessor (in its queue or among its dependencies) that ended last:

    communication   a collective on that path is running                            exposed communication
    copies          a copy between tiers on that path is running
    peers           a collective on that path waits for other ranks, or the rank has finished runtime         all else:
    the host, and in a measurement gaps that nothing explains

Waiting for peers has two causes. In a group it is `imbalance`: with equal work all ranks would arrive at once. Between
two ranks, as along a pipeline, over all groups of a pipeline, and at the end of the step, it is imbalance up to the
time that the busiest rank computes longer than this one, and `fill_drain` beyond that. So for 1F1B on P equal stages,
fill and drain are (P − 1)(F + B), the bubble of PipeDream-Flush (Narayanan et al., arXiv 2006.09503, section 3.2; arXiv
2104.04473, section 2.2.1).

    busy + imbalance + fill_drain + communication + copies + runtime = step         on every rank
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from hyper_parallel.trace.trace import Span, copy_tiers, is_comm, is_compute

PIPELINE = "pipeline"
"""The axis of collectives over the device groups of a pipeline, which end one after another."""
_TINY = 1e-12
"""Tolerance for equal times, as a share of the step."""


@dataclass(frozen=True)
class Bubbles:
    """Idle seconds of a step, by cause."""

    imbalance: float = 0.0
    """Waiting for ranks that have more to compute."""
    fill_drain: float = 0.0
    """Waiting for the first micro-batch to arrive and the last to leave: the bubble of a balanced pipeline."""
    communication: float = 0.0
    """Waiting for running collectives: exposed communication."""
    copies: float = 0.0
    """Waiting for copies between tiers."""
    runtime: float = 0.0
    """Waiting for the host."""

    @property
    def total(self) -> float:
        """Their sum: the step less the time in which kernels run."""
        return self.imbalance + self.fill_drain + self.communication + self.copies + self.runtime

    def scaled(self, factor: float) -> Bubbles:
        """All of them times a factor."""
        return Bubbles(*(getattr(self, field.name) * factor for field in fields(self)))

    def __add__(self, other: Bubbles) -> Bubbles:
        return Bubbles(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass
class _Idle:
    """The idle time of one rank by cause, before waits for peers are classified."""

    communication: float = 0.0
    copies: float = 0.0
    runtime: float = 0.0
    group: float = 0.0
    """Waiting for peers in a group."""
    pair: float = 0.0
    """Waiting for a single peer, and at the end."""
    calls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The communication, by kind of collective and axis."""


def bubbles(spans: Sequence[Span], step: float, busiest: float) -> Bubbles:
    """The bubbles of one rank, whose spans are in the order of its ops.

    `busiest` is the longest time, in seconds, that any rank of the step computes.
    """
    found, running = _idle(spans, step)
    behind = max(0.0, busiest - sum(end - start for start, end in running) - found.group)
    uneven = min(found.pair, behind)
    return Bubbles(
        found.group + uneven, found.pair - uneven, found.communication, found.copies, found.runtime
    )


def exposed_calls(spans: Sequence[Span], step: float) -> dict[str, float]:
    """Exposed communication of one rank in seconds by collective, such as `all_gather over shard`; the sum is
    `Bubbles.communication`."""
    return dict(_idle(spans, step)[0].calls)


def _idle(spans: Sequence[Span], step: float) -> tuple[_Idle, list[tuple[float, float]]]:
    """The idle time of one rank, and the intervals in which its kernels run."""
    found = _Idle()
    running = busy(spans, kernels=True)
    waits = _Waits(spans, step * _TINY)
    cursor = 0.0
    first = {span.start: span for span in reversed(spans) if is_compute(span.op.queue)}
    for start, end in running:
        if start - cursor > waits.tiny:
            waits.explain(first[start], cursor, start, found)
        cursor = end
    if spans:
        last = max(spans, key=lambda span: (span.end, span.op.index))
        if last.end - cursor > waits.tiny:
            waits.account(last, cursor, last.end, found)
            waits.explain(last, cursor, last.start, found)
        found.pair += max(0.0, step - max(last.end, cursor))
    return found, running


def busy(spans: Sequence[Span], *, kernels: bool) -> list[tuple[float, float]]:
    """The merged intervals in which a rank's kernels, or its collectives, run."""
    wanted = is_compute if kernels else is_comm
    stretches: list[tuple[float, float]] = []
    for start, end in sorted((s.start, s.end) for s in spans if s.end > s.start and wanted(s.op.queue)):
        if stretches and start <= stretches[-1][1]:
            if end > stretches[-1][1]:
                stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((start, end))
    return stretches


class _Waits:
    """The op that each op of one rank waited for."""

    def __init__(self, spans: Sequence[Span], tiny: float) -> None:
        self.tiny = tiny
        self._spans = {span.op.index: span for span in spans}
        self._ahead: dict[int, Span] = {}
        last: dict[str, Span] = {}
        for span in spans:
            if span.op.queue in last:
                self._ahead[span.op.index] = last[span.op.queue]
            last[span.op.queue] = span

    def explain(self, span: Span, start: float, end: float, found: _Idle) -> None:
        """Attribute the idle time from `start` to `end`, the latest time at which `span` could begin."""
        while end - start > self.tiny:
            if end > span.ready:
                # A collective waits for peers; a kernel for its engine, or in a measurement for its launch.
                self._add(found, self._waiting(span), max(start, span.ready), end)
                end = max(start, min(end, span.ready))
            blockers = [self._spans[index] for index in span.op.after if index in self._spans]
            if span.op.index in self._ahead:
                blockers.append(self._ahead[span.op.index])
            if not blockers:
                break
            span = max(blockers, key=lambda other: (other.end, other.op.index))
            if end > span.end:
                self._add(found, "runtime", max(start, span.end), end)
                end = max(start, span.end)
            self.account(span, start, end, found)
            end = min(end, span.start)
        if end - start > self.tiny:
            self._add(found, "runtime", start, end)

    def account(self, span: Span, start: float, end: float, found: _Idle) -> None:
        """The part of the interval from `start` to `end` in which `span` runs."""
        queue = span.op.queue
        kind = "communication" if is_comm(queue) else "copies" if copy_tiers(queue) else "runtime"
        begin, end = max(start, span.start), min(end, span.end)
        self._add(found, kind, begin, end)
        if span.op.collective is not None and end > begin:
            found.calls[f"{span.op.sort} over {span.op.collective.axis}"] += end - begin

    @staticmethod
    def _waiting(span: Span) -> str:
        call = span.op.collective
        if call is None:
            return "runtime"
        return "pair" if call.paired or call.axis == PIPELINE else "group"

    @staticmethod
    def _add(found: _Idle, kind: str, start: float, end: float) -> None:
        if end > start:
            setattr(found, kind, getattr(found, kind) + end - start)
