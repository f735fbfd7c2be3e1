"""Timeline: when each op ran on which engine; one type for prediction and measurement.

    step     = the end of the last op                                              `Timeline.step`
    MFU      = model FLOPs / (step · ranks · peak)                                 `Timeline.mfu`
    exposed  = time in which a rank computes nothing and a collective runs         `Timeline.exposed` masked   = 1 −
    exposed / communication                    by blocked time      `Timeline.masked`
             = (T_comp + T_comm − step) / T_comm              end to end

`communication` is the time in which any collective of a rank runs. T_comp and T_comm are the steps of the same
Trace in which only kernels, or only collectives, take time. Masking by blocked time is the share of communication that
the devices did not wait for; end to end it also counts that kernels run slower in parallel with it. Both are 1 if
communication costs nothing, and 0 if it adds all of its time to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from hyper_parallel.trace import memory_timeline
from hyper_parallel.trace.bubbles import Bubbles, bubbles, busy, exposed_calls
from hyper_parallel.trace.memory_timeline import MemoryCurve, Peak
from hyper_parallel.trace.trace import Kind, Span, Trace, copy_tiers, is_comm, is_compute, pattern
from hyper_parallel.workload.work import mfu


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of the step if only one kind of op takes time."""

    compute: float
    """Kernels (T_comp)."""
    communication: float
    """Collectives (T_comm)."""


@dataclass(frozen=True, slots=True)
class Masked:
    """The share of communication that costs no time, at most 1. The module's docstring has both definitions."""

    blocked: float | None
    """By blocked time; None if nothing is sent."""
    end_to_end: float | None
    """End to end; None if nothing is sent, or if the times alone are unknown."""


@dataclass(frozen=True)
class Timeline:
    """When each op of a Trace ran. All figures are computed from the spans and the Trace.

    Figures without a rank are means over all ranks, except peaks, which are those of the rank that holds most.
    """

    trace: Trace
    spans: tuple[Span, ...]
    """Spans class by class, each in the order of its ops."""
    predicted: bool
    """Whether it was simulated; otherwise it was measured."""
    device: str
    """The name of the device."""
    cluster: str = ""
    """The name of the cluster."""
    source: str = ""
    """The source of the cluster's constants."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device in the dtype of most matrix products."""
    alone_of: Callable[[], Alone] | None = field(default=None, repr=False, compare=False)
    """Computes `alone`, which takes two simulations; None where the times alone are unknown."""
    capacity: Mapping[str, float] = field(default_factory=dict)
    """Bytes of each tier per device; for a shared tier its share."""

    @property
    def word(self) -> str:
        """`predicted` or `measured`."""
        return "predicted" if self.predicted else "measured"

    @cached_property
    def alone(self) -> Alone | None:
        """The steps of kernels alone and of collectives alone, found when they are first asked for."""
        return None if self.alone_of is None else self.alone_of()

    @cached_property
    def step(self) -> float:
        """Seconds of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None if the FLOPs or the peak are unknown."""
        if not (self.trace.model_flops and self.peak_flops and self.step):
            return None
        return mfu(self.trace.model_flops, self.step, self.trace.world, self.peak_flops)

    def of(self, name: str) -> tuple[Span, ...]:
        """The spans of a rank class, in the order of its ops."""
        return self._by_class[name]

    @cached_property
    def bubbles_by_class(self) -> dict[str, Bubbles]:
        """Bubbles of a rank of each class, in seconds by cause."""
        busiest = max((_length(busy(self.of(name), kernels=True)) for name in self.trace.ops), default=0.0)
        return {name: bubbles(self.of(name), self.step, busiest) for name in self.trace.ops}

    @property
    def bubbles(self) -> Bubbles:
        """Bubbles of a rank, in seconds by cause."""
        return sum(
            (found.scaled(self._share(name)) for name, found in self.bubbles_by_class.items()), Bubbles()
        )

    @property
    def computing(self) -> float:
        """Seconds in which a rank's kernels run."""
        return self._mean(lambda name: _length(busy(self.of(name), kernels=True)))

    @property
    def communicating(self) -> float:
        """Seconds in which any collective of a rank runs, without the wait for other ranks."""
        return self._mean(lambda name: _length(busy(self.of(name), kernels=False)))

    @property
    def exposed(self) -> float:
        """Seconds in which a rank computes nothing and waits only for a running collective."""
        return self.bubbles.communication

    @property
    def masked(self) -> Masked:
        """The share of communication that is hidden behind computation, by both definitions."""
        sent = self.communicating
        whole = None
        if self.alone and self.alone.communication:
            both = self.alone.compute + self.alone.communication
            whole = (both - self.step) / self.alone.communication
        return Masked(max(0.0, 1 - self.exposed / sent) if sent else None, whole)

    def memory(self, name: str, tier: str = "device") -> MemoryCurve:
        """Bytes alive over time, by kind, on a rank of a class."""
        return memory_timeline.curve(self.trace, name, self.of(name), tier)

    def peak_of(self, name: str, tier: str = "device") -> Peak:
        """The moment of peak memory of a class's ranks in a tier."""
        found = self._peaks.get((name, tier))
        if found is None:
            found = self._peaks[name, tier] = memory_timeline.peak(self.trace, name, self.of(name), tier)
        return found

    def peak_in(self, tier: str) -> Peak:
        """The moment of peak memory in a tier, on the rank that holds most."""
        return max((self.peak_of(name, tier) for name in self.trace.ops), key=lambda found: found.bytes)

    @property
    def peak(self) -> Peak:
        """The moment of peak device memory, on the rank that holds most."""
        return self.peak_in("device")

    def peak_by_kind(self, tier: str = "device") -> dict[Kind, int]:
        """Bytes by kind at the tier's peak."""
        return self.peak_in(tier).by_kind

    def by_phase(self) -> dict[str, Sum]:
        """Sums by phase; recomputed ops count as `recompute`."""
        return sums(self._weighted(), lambda span: span.op.part)

    def by_module(self) -> dict[str, Sum]:
        """Sums by module, with `*` for the index of a layer."""
        known: dict[str, str] = {}

        def key(span: Span) -> str:
            module = span.op.module
            if module not in known:
                known[module] = pattern(module)
            return known[module]

        return sums(self._weighted(), key)

    def by_kind(self) -> dict[str, Sum]:
        """Sums by kind of work and of collective."""
        return sums(self._weighted(), lambda span: span.op.sort)

    def by_axis(self) -> dict[str, Sum]:
        """Sums of the collectives by axis."""
        calls = (pair for pair in self._weighted() if pair[0].op.collective)
        return sums(calls, lambda span: span.op.collective.axis if span.op.collective else "")

    @cached_property
    def _by_class(self) -> dict[str, tuple[Span, ...]]:
        found: dict[str, list[Span]] = {name: [] for name in self.trace.ops}
        for span in self.spans:
            found[self.trace.classes[span.rank]].append(span)
        return {name: tuple(spans) for name, spans in found.items()}

    @cached_property
    def _peaks(self) -> dict[tuple[str, str], Peak]:
        return {}

    def _weighted(self) -> Iterator[tuple[Span, float]]:
        """Each span with its class's share of the ranks."""
        for name in self.trace.ops:
            share = self._share(name)
            for span in self.of(name):
                yield span, share

    def _share(self, name: str) -> float:
        return self.trace.size(name) / self.trace.world

    def _mean(self, seconds: Callable[[str], float]) -> float:
        return sum(seconds(name) * self._share(name) for name in self.trace.ops)


def _length(stretches: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in stretches)


@dataclass
class Sum:
    """Times of one row, as means over all ranks. Queues run in parallel, so that seconds of different queues may
    overlap.
    """

    compute: float = 0.0
    """Seconds of kernels."""
    communication: float = 0.0
    """Seconds of collectives, without their wait for other ranks."""
    copies: float = 0.0
    """Seconds of copies between tiers."""
    host: float = 0.0
    """Seconds of host work."""
    count: float = 0.0
    """Number of ops."""
    flops: float = 0.0
    """FLOPs of kernels, matrix and vector."""

    @property
    def total(self) -> float:
        """All seconds."""
        return self.compute + self.communication + self.copies + self.host

    def __iadd__(self, other: Sum) -> Sum:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self


def sums(spans: Iterable[tuple[Span, float]], key: Callable[[Span], str]) -> dict[str, Sum]:
    """The sums of spans by a key, in order of appearance; each span counts with its weight."""
    found: dict[str, Sum] = {}
    for span, weight in spans:
        op = span.op
        into = found.setdefault(key(span), Sum())
        seconds = (span.end - span.start) * weight
        if is_compute(op.queue):
            into.compute += seconds
        elif is_comm(op.queue):
            into.communication += seconds
        elif copy_tiers(op.queue):
            into.copies += seconds
        else:
            into.host += seconds
        into.count += weight
        if op.work:
            into.flops += (op.work.flops + op.work.vector_flops) * weight
    return found


# Parts of a step: what its seconds are spent on, by class of operator, exposed collective and cause of waiting.
#
#     step = Σ kernels by class + Σ exposed communication by collective + waiting          mean over ranks
#
# Kernels of two engines that run at the same time share that time in proportion to their seconds. Each part is seconds,
# so that parts of two steps, or of a step and an estimate, can be compared.

CLASSES = {
    "matmul": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "reduce": "elementwise",
    "copy": "elementwise",
    "view": "elementwise",
    "optimizer": "optimizer",
}
"""Class of operators by kind of `Work`; norms, activations, residuals and copies are one: all are bound by memory."""
PIPELINE, HOST, OTHER, TASKS = "pipeline", "host", "waiting", "tasks"


def step_parts(timeline: Timeline, tasks: Mapping[str, float] | None = None) -> dict[str, float]:
    """Seconds of a step by part; they add up to `Timeline.step`.

    `tasks`: seconds by part of what an op without work stands for, a pipeline's task, whose time is shared out so.
    """
    kernels: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, float] = defaultdict(float)
    world = timeline.trace.world
    for name in timeline.trace.ops:
        spans = timeline.of(name)
        share = sum(one == name for one in timeline.trace.classes.values()) / world
        for span in spans:
            if is_compute(span.op.queue) and span.end > span.start:
                kernels[_class_of(span.op.sort, span.op.phase)] += share * (span.end - span.start)
        for call, seconds in exposed_calls(spans, timeline.step).items():
            calls[call] += share * seconds
    total = sum(kernels.values())
    scale = timeline.computing / total if total else 0.0
    parts = {kind: seconds * scale for kind, seconds in kernels.items()}
    parts |= calls
    bubbles = timeline.bubbles
    # In a measurement, what nothing explains is no certain work of the host.
    host = bubbles.runtime if timeline.predicted else 0.0
    waiting = bubbles.imbalance + bubbles.copies + bubbles.runtime - host
    parts |= {PIPELINE: bubbles.fill_drain, HOST: host, OTHER: waiting}
    whole = sum(tasks.values()) if tasks else 0.0
    for name, seconds in (tasks or {}).items():
        parts[name] = parts.get(name, 0.0) + seconds / whole * parts.get(TASKS, 0.0)
    if whole:
        parts.pop(TASKS, None)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _class_of(sort: str, phase: str) -> str:
    return "optimizer" if phase in ("clip", "optimizer") else CLASSES.get(sort, TASKS)
