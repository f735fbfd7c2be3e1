"""Timeline: when each op ran on which engine; one type for prediction and measurement.

    step     = the end of the last op                                              `Timeline.step`
    MFU      = model FLOPs / (step · ranks · peak)                                 `Timeline.mfu`
    exposed  = time in which nothing is computed, for collectives that run         `Timeline.exposed`
    masked   = 1 − exposed / communication                    by blocked time      `Timeline.masked`
             = (T_comp + T_comm − step) / T_comm              end to end

`communication` is the time in which any collective of a rank runs. T_comp and T_comm are the steps of the same
Trace with only its kernels and with only its collectives taking any time. Masking by blocked time tells how much
of the communication the devices did not wait for; end to end it also pays for kernels that run slower beside it.
Both are 1 when communication costs nothing, and 0 when it adds all of its time to the step.
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
    """Seconds of the step with only one sort of op taking any time."""

    compute: float
    """Kernels (T_comp)."""
    communication: float
    """Collectives (T_comm)."""


@dataclass(frozen=True, slots=True)
class Masked:
    """The share of communication that costs no time, at most 1. The module's docstring has both definitions."""

    blocked: float | None
    """By blocked time; None where nothing is sent."""
    end_to_end: float | None
    """None where nothing is sent, or the times alone are not known."""


@dataclass(frozen=True)
class Timeline:
    """When each op of a Trace ran. Every figure it knows is worked out from the spans and the Trace.

    Figures without a rank are means over all ranks, except peaks, which are of the rank that holds most.
    """

    trace: Trace
    spans: tuple[Span, ...]
    """Class by class, each in the order of its ops."""
    predicted: bool
    """By simulation; otherwise measured."""
    device: str
    """The name of the device."""
    cluster: str = ""
    """The name of the cluster."""
    source: str = ""
    """Where the cluster's constants come from."""
    peak_flops: float | None = None
    """FLOP/s of one device at its best in the dtype that the step mostly multiplies in."""
    alone: Alone | None = None
    capacity: Mapping[str, float] = field(default_factory=dict)
    """What a device has of each tier, in bytes; of a tier that several share, its part."""

    @property
    def word(self) -> str:
        """`predicted` or `measured`."""
        return "predicted" if self.predicted else "measured"

    @cached_property
    def step(self) -> float:
        """Seconds of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None where the FLOPs or the peak are not known."""
        if not (self.trace.model_flops and self.peak_flops and self.step):
            return None
        return mfu(self.trace.model_flops, self.step, self.trace.world, self.peak_flops)

    def of(self, name: str) -> tuple[Span, ...]:
        """The spans of a rank class, in the order of its ops."""
        return self._by_class[name]

    @cached_property
    def bubbles_by_class(self) -> dict[str, Bubbles]:
        """What a rank of each class waits for, in seconds."""
        busiest = max((_length(busy(self.of(name), kernels=True)) for name in self.trace.ops), default=0.0)
        return {name: bubbles(self.of(name), self.step, busiest) for name in self.trace.ops}

    @property
    def bubbles(self) -> Bubbles:
        """What a rank waits for, in seconds."""
        return sum(
            (found.scaled(self._share(name)) for name, found in self.bubbles_by_class.items()), Bubbles()
        )

    @property
    def computing(self) -> float:
        """Seconds in which a rank's kernels run."""
        return self._mean(lambda name: _length(busy(self.of(name), kernels=True)))

    @property
    def communicating(self) -> float:
        """Seconds in which any collective of a rank runs; the wait for other ranks is no part of it."""
        return self._mean(lambda name: _length(busy(self.of(name), kernels=False)))

    @property
    def exposed(self) -> float:
        """Seconds in which a rank computes nothing and waits only for a collective that runs."""
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
        """The moment at which a rank of a class holds most in a tier."""
        found = self._peaks.get((name, tier))
        if found is None:
            found = self._peaks[name, tier] = memory_timeline.peak(self.trace, name, self.of(name), tier)
        return found

    def peak_in(self, tier: str) -> Peak:
        """The moment at which a tier holds most, of the rank that holds most."""
        return max((self.peak_of(name, tier) for name in self.trace.ops), key=lambda found: found.bytes)

    @property
    def peak(self) -> Peak:
        """The moment at which the device holds most, of the rank that holds most."""
        return self.peak_in("device")

    def peak_by_kind(self, tier: str = "device") -> dict[Kind, int]:
        """Bytes by kind at the tier's peak."""
        return self.peak_in(tier).by_kind

    def by_phase(self) -> dict[str, Sum]:
        """Sums by phase; the second run of recomputed ops is `recompute`."""
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
        """Each span with the share of the ranks that it stands for."""
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
