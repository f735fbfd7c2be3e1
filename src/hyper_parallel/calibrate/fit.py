"""Fits a Device's tables to measured seconds: shares of the highest measured rate.

    peak = max flops / (seconds − launch)               of products large enough to have settled     `peak_of`
    share = flops / (peak · (seconds − launch))         `shape_table`
    share = bytes / (bandwidth · (seconds − launch))    `memory_table`
    launch = t₀ − b₀ · (t₁ − t₀) / (b₁ − b₀)            from the two smallest sizes, at least t₀ / 5     `_launch`

A product's smooth curve is the best of a grid of half lengths; the logarithm of `best` for each is the mean over the
points (`shape_table`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import cast

from hyper_parallel.cluster import MemoryTable, ShapeTable

SETTLED = 2**24
"""Minimum FLOPs of a product whose rate may count as a peak."""
_HALVES = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_LEAST = 0.1
"""Minimum share of a measured time that remains after the launch is subtracted, since both have measurement errors."""

Shape = tuple[float, float, float, float]
_Row = tuple[float, float, float, float, float]


def net(seconds: float, launch: float) -> float:
    """Seconds without the launch."""
    return max(seconds - launch, _LEAST * seconds)


def peak_of(points: Mapping[Shape, float], flops_of: Mapping[Shape, float], launch: float) -> float:
    """The highest FLOP/s of the points; `points` are seconds by shape."""
    settled = [shape for shape in points if flops_of[shape] >= SETTLED] or list(points)
    return max(flops_of[shape] / net(points[shape], launch) for shape in settled)


def shape_table(
    points: Mapping[Shape, float],
    flops_of: Mapping[Shape, float],
    peak: float,
    launch: float,
    dtype: str,
    layout: str,
    spread: float,
) -> ShapeTable:
    """The table of what was measured, exact at its points."""
    shares = {shape: flops_of[shape] / (peak * net(seconds, launch)) for shape, seconds in points.items()}
    halves = ((a, b, c) for a, b, c in product(_HALVES, repeat=3))
    _, best, half = min((_best(shares, half) for half in halves), key=lambda found: found[0])
    rows = tuple(cast(_Row, (*map(float, shape), _short(share))) for shape, share in sorted(shares.items()))
    return ShapeTable(dtype, layout, _short(best), half, rows, _short(spread))


def _best(
    shares: Mapping[Shape, float], half: tuple[float, float, float]
) -> tuple[float, float, tuple[float, float, float]]:
    """(error, best, half): the best share for these half lengths, and the mean squared residual in logarithms."""
    logs = [
        math.log(share) + sum(math.log1p(h / size) for h, size in zip(half, shape[1:], strict=True))
        for shape, share in shares.items()
    ]
    mean = sum(logs) / len(logs)
    return sum((log - mean) ** 2 for log in logs) / len(logs), math.exp(mean), half


def memory_table(
    points: Mapping[float, float],
    bandwidth: float,
    spread: float,
    *,
    kind: str,
    op: str,
    dtype: str,
    layout: str,
) -> MemoryTable:
    """The table of what was measured; `points` are seconds by bytes read and written."""
    sizes = sorted(points)
    launch = _launch(points)
    rows = tuple(
        (float(size), _short(size / (bandwidth * net(points[size], launch)))) for size in sizes if size > 0
    )
    return MemoryTable(kind, op, dtype, layout, _short(launch), rows or ((1.0, 1.0),), _short(spread))


def _launch(points: Mapping[float, float]) -> float:
    smallest, *others = sorted(points)
    time = points[smallest]
    if smallest == 0 or not others:
        return time
    slope = max(0.0, (points[others[0]] - time) / (others[0] - smallest))
    return max(time / 5, time - slope * smallest)


def _short(number: float) -> float:
    """Rounded to five digits; no measurement is more accurate."""
    return float(f"{number:.5g}")
