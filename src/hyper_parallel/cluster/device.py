"""A device, its memory and its links: the time of an operator on it (a roofline model), and measured collectives and
copies.

    seconds(work) = launch + max(compute, memory) + fresh                       `Device.seconds`
    compute = flops / (matrix · efficiency(shape)) + vector_flops / vector      `Device.compute_seconds`
    memory  = (read / tier.read + written / tier.write) / efficiency(bytes)     `Device.memory_seconds`
    fresh   = fresh bytes / tier.write / efficiency(fresh bytes)                `Device.fresh_seconds`

This is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009, figure 1a) with efficiencies that depend on
the shape. An operator that was measured by name has its own launch time and memory efficiency, which include its
arithmetic, so that its vector FLOPs are not counted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.cluster.efficiency import Count, Curve, Efficiency, NotNegative, Positive, Share
from hyper_parallel.workload.work import Work


@dataclass(frozen=True)
class Tier:
    """A memory: a device's own, the host's, a pool, flash."""

    name: str
    bytes: Positive
    """Capacity in bytes."""
    read: Positive
    """Read bandwidth, B/s."""
    write: Positive
    """Write bandwidth, B/s. If reads and writes share one bandwidth, `read` has the same number."""
    latency: NotNegative = 0.0
    """Seconds before the first byte."""
    ranks: Count = 1
    """Number of devices that share its bytes and bandwidth."""


@dataclass(frozen=True)
class Link:
    """Link between the devices of a level, or between a device and a tier; the numbers are one device's share."""

    level: str
    """`node`, `supernode` or `network`; or the tier at its end: `host`, `pool`, `flash`."""
    bandwidth: Positive
    """B/s in one direction, as the maker states it."""
    latency: NotNegative
    """Seconds of one message."""
    efficiency: Share = 1.0
    """The share of `bandwidth` that large messages reach, 0 to 1."""
    setup: NotNegative = 0.0
    """Seconds that a collective call takes in addition to its messages."""
    shared_paths: bool = False
    """Whether the traffic of different nodes shares paths between switches, as on Ethernet, which chooses a path by a
    hash; not on InfiniBand with a rail for each device, whose fat tree has a path for all."""

    @property
    def reached(self) -> float:
        """B/s of large messages."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Device:
    """One device of a cluster."""

    name: str
    matrix: Mapping[str, Positive]
    """Dense peak FLOP/s of matrix products, by dtype."""
    vector: Mapping[str, Positive]
    """Peak FLOP/s of everything else, by dtype."""
    memory: Tier
    launch: NotNegative = 0.0
    """Seconds of an empty operator."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    comm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the multiprocessors that a collective takes while it runs, 0 to 1."""
    comm_slowdown: Annotated[float, Field(ge=1)] = 1.0
    """Slowdown of an operator that runs in parallel with a collective."""
    host_launch: NotNegative = 0.0
    """Seconds in which the host enqueues an operator, while the device runs earlier ones; 0 where the device never
    waits for that, as with recorded graphs of kernels."""
    host_kernels: Mapping[str, Positive] = field(default_factory=dict)
    """Launches of operators that are several kernels to the host, by the operator's name in a trace."""
    comm_hidden: Mapping[str, Share] = field(default_factory=dict)
    """By mesh axis, the share of a collective's seconds that runs in parts beside the product that it serves, as
    libraries do that overlap tensor parallelism; axes that are not named wait for all of it."""

    def seconds(self, work: Work) -> float:
        """Seconds of the operator, alone on the device."""
        if work.seconds is not None:
            return work.seconds
        if work.kind == "host":
            return self.launch
        busy = max(self.compute_seconds(work), self.memory_seconds(work))
        return self.launch_seconds(work) + busy + self.fresh_seconds(work)

    def launch_seconds(self, work: Work) -> float:
        """Launch cost of the operator in seconds."""
        measured = self.efficiency.memory_of(work)
        if measured is None or measured.launch is None:
            # No kernel runs for a view; what it costs the host is known where it was measured.
            return 0.0 if work.kind == "view" else self.launch
        return measured.launch

    def compute_seconds(self, work: Work) -> float:
        """Seconds of the arithmetic at the rate that this shape reaches."""
        flops, share = work.flops, 1.0
        if work.kind == "matmul":
            share = self.efficiency.matmul_share(work)
        elif work.kind == "attention":
            flops, share = self.efficiency.attention_rate(work)
        seconds = flops / (self.peak(work.dtype) * share) if flops else 0.0
        measured = self.efficiency.memory_of(work)
        if work.vector_flops and not (measured and measured.op):
            seconds += work.vector_flops / self.vector_peak(work.dtype)
        return seconds

    def memory_seconds(self, work: Work) -> float:
        """Seconds of the memory traffic at the rate that this number of bytes reaches."""
        moved = work.read + work.written
        if not moved or work.kind == "view":
            return 0.0
        measured = self.efficiency.memory_of(work)
        share = measured.curve.at(moved) if measured else 1.0
        return (work.read / self.memory.read + work.written / self.memory.write) / share

    def fresh_seconds(self, work: Work) -> float:
        """Seconds that the first touch of newly allocated memory adds."""
        curve = self.efficiency.fresh_curve
        return work.fresh / (self.memory.write * curve.at(work.fresh)) if work.fresh and curve else 0.0

    def slowed(self, times: float) -> Device:
        """The same device, slower by the factor `times`."""
        memory = self.memory
        return replace(
            self,
            matrix={dtype: rate / times for dtype, rate in self.matrix.items()},
            vector={dtype: rate / times for dtype, rate in self.vector.items()},
            memory=replace(memory, read=memory.read / times, write=memory.write / times),
            launch=self.launch * times,
            host_launch=self.host_launch * times,
            efficiency=self.efficiency.slowed(times),
        )

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products in a dtype; of float32 if the device has no figure for the dtype."""
        return _of(self.matrix, dtype)

    def vector_peak(self, dtype: str) -> float:
        """FLOP/s of other arithmetic in a dtype; of float32 if the device has no figure for the dtype."""
        return _of(self.vector, dtype)


def _of(peaks: Mapping[str, float], dtype: str) -> float:
    if dtype in peaks:
        return peaks[dtype]
    # Halves and eighths run at the rate of their equals; what has no figure runs as the slowest that has one.
    for family in (("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")):
        if dtype in family:
            for other in family:
                if other in peaks:
                    return peaks[other]
    return peaks.get("float32", min(peaks.values()))


# Measured collectives and copies, with the fitted α and β.
#
# A table is exact at its points; between them it is a `Curve` of seconds by bytes. Below the smallest point the time is
# constant, and beyond the largest the bandwidth is. For other numbers of ranks the closed form of
# `cluster.collective_cost` is used with the fitted α and β.

MEASURED = "this-machine"
"""Name of a cluster that `calibrate` measured."""


@dataclass(frozen=True)
class CollectiveTable:
    """Times of one kind of collective among a number of ranks on one level."""

    kind: str
    level: str
    ranks: Count
    points: tuple[tuple[float, float], ...]
    """Bytes that a rank gives, seconds."""
    latency: NotNegative
    """α of the closed form that fits best, in seconds."""
    bandwidth: Positive
    """β of the closed form that fits best, in B/s."""
    residual: NotNegative
    """Error of the fit: the mean of |fitted / measured − 1|."""
    spread: float | None = None
    """Spread of the measured times: the mean of (third quartile − first) / median."""

    def __post_init__(self) -> None:
        form(self.kind)  # raises for an unknown kind
        Curve(self.points)  # raises for invalid points

    def seconds(self, size: float, ranks: int) -> float:
        """Seconds of the collective among `ranks` of this level, each giving `size` bytes."""
        if ranks != self.ranks:
            return form(self.kind)(ranks, size, self.latency, self.bandwidth)
        return _seconds(self._curve, size)

    @cached_property
    def _curve(self) -> Curve:
        return Curve(self.points)


@dataclass(frozen=True)
class CopyTable:
    """Copies from one tier to another."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]
    """Bytes, seconds."""
    spread: float | None = None
    """As `CollectiveTable.spread`."""

    def __post_init__(self) -> None:
        Curve(self.points)  # raises for invalid points

    def seconds(self, size: float) -> float:
        """Seconds of a copy of `size` bytes."""
        return _seconds(self._curve, size)

    @cached_property
    def _curve(self) -> Curve:
        return Curve(self.points)


@dataclass(frozen=True)
class Shared:
    """A machine whose workers share its cores, as each of a number of workers sees it."""

    device: Device
    collectives: tuple[CollectiveTable, ...] = ()
    slower: Positive | None = None
    """If workers outnumber the cores: the slowdown of a few operators compared with one worker per core, from which the
    device is estimated. None if the device was measured.
    """


def _seconds(curve: Curve, size: float) -> float:
    largest, seconds = curve.points[-1]
    return seconds * size / largest if size > largest else curve.at(max(size, curve.points[0][0]))
