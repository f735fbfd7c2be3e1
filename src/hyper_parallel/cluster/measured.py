"""Measured collectives and copies, with the fitted α and β.

A table is exact at its points; between them it is a `Curve` of seconds by bytes. Below the smallest point the time is
constant, and beyond the largest the bandwidth is. For other numbers of ranks the closed form of
`cluster.collective_cost` is used with the fitted α and β.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.cluster.curve import Curve
from hyper_parallel.cluster.device import Device
from hyper_parallel.cluster.numbers import Count, NotNegative, Positive

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
