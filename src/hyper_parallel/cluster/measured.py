"""Collectives and copies as they were measured, with the α and β that fit them.

A table is exact at its points; between them it is a `Curve` of seconds by bytes. Below its smallest point a call takes
what the smallest took, and beyond the largest the bandwidth of the largest holds. For other numbers of ranks the fit's
α and β are put into the closed form of `cluster.collective`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.cluster.collective import form
from hyper_parallel.cluster.curve import Curve
from hyper_parallel.cluster.device import Device
from hyper_parallel.cluster.numbers import Count, NotNegative, Positive

MEASURED = "this-machine"
"""The name of a cluster that `calibrate` measured."""


@dataclass(frozen=True)
class CollectiveTable:
    """One kind of collective among so many ranks of one level."""

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
    """What is left: the mean of |fitted / measured − 1|."""
    spread: float | None = None
    """Of the measured times: the mean of (third quartile − first) / median."""

    def __post_init__(self) -> None:
        form(self.kind)  # raises for what is no collective
        Curve(self.points)  # and for what is no curve

    def seconds(self, size: float, ranks: int) -> float:
        """How long the collective takes among `ranks` of this level, `size` bytes given by each."""
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
        Curve(self.points)  # raises for what is no curve

    def seconds(self, size: float) -> float:
        """How long a copy of `size` bytes takes."""
        return _seconds(self._curve, size)

    @cached_property
    def _curve(self) -> Curve:
        return Curve(self.points)


@dataclass(frozen=True)
class Shared:
    """A machine whose workers share its cores, as each of so many sees it."""

    device: Device
    collectives: tuple[CollectiveTable, ...] = ()
    slower: Positive | None = None
    """Where workers outnumber the cores: how many times as long a few operators took as with one worker a core. The
    device is estimated with it; None where the device was measured."""


def _seconds(curve: Curve, size: float) -> float:
    largest, seconds = curve.points[-1]
    return seconds * size / largest if size > largest else curve.at(max(size, curve.points[0][0]))
