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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hyper_parallel.trace import memory_timeline
from hyper_parallel.trace.breakdown import Sum, sums
from hyper_parallel.trace.bubbles import Bubbles, bubbles, busy
from hyper_parallel.trace.memory_timeline import MemoryCurve, Peak
from hyper_parallel.trace.op import Kind, pattern
from hyper_parallel.trace.span import Span
from hyper_parallel.trace.trace import Trace
from hyper_parallel.workload.flops import mfu


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
