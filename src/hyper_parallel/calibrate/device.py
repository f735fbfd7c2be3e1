"""A `Device` from one worker's measurements: shares of the highest measured rate, and launch costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import cast

from hyper_parallel.calibrate.timing import Results, rounded
from hyper_parallel.cluster import Device, Efficiency, MemoryTable, ShapeTable, Tier
from hyper_parallel.cluster.efficiency import attention_flops

STAND_FOR = {"aten.add": "elementwise", "aten.sum": "reduce", "aten.clone": "copy"}
"""Operators whose tables, of both layouts, also price unmeasured operators of their kind."""
MOST = 1e3
"""A share above which the first touch of new memory counts as free."""


def device_of(results: Results, name: str, memory_bytes: float, peaks: dict[str, float | None]) -> Device:
    """The worker's device. `peaks` are the maker's FLOP/s by dtype, if published."""
    ((moved, seconds),) = [(key[0], value) for key, value in results.table("copied").items()]
    bandwidth = cast(float, moved) / seconds
    memory = tuple(_memory_tables(results, bandwidth))
    adds = [table for table in memory if table.op == "aten.add" and table.dtype == "float32"]
    matrix: dict[str, float] = {}
    matmul, attention = [], []
    launches = {str(key[0]): seconds for key, seconds in results.table("matmul launch").items()}
    for dtype in dict.fromkeys(key[0] for key in results.table("matmul")):
        points = results.grouped("matmul", dtype, parts=1)
        flops = {shape: 2.0 * _volume(shape) for layout in points.values() for shape in layout}
        launch = launches[str(dtype)]
        measured = max(peak_of(layout, flops, launch) for layout in points.values())
        matrix[str(dtype)] = peak = peaks.get(str(dtype)) or rounded(measured)
        for (layout,), seconds_by in points.items():
            spread = results.spread("matmul", dtype, layout)
            table = shape_table(seconds_by, flops, peak, launch, str(dtype), layout, spread)
            between = results.grouped("between", dtype, parts=1).get((layout,), {})
            off = [
                abs(launch + 2.0 * _volume(s) / (peak * table.share(s)) - t) / t for s, t in between.items()
            ]
            matmul.append(replace(table, residual=rounded(sum(off) / len(off))) if off else table)
        attention += _attention(results, str(dtype), peak)
    return Device(
        name,
        matrix=matrix,
        vector={"float32": rounded(2**20 / results.seconds[("vector",)])},
        memory=Tier("device", memory_bytes, rounded(bandwidth), rounded(bandwidth)),
        launch=(adds[0].launch if adds else None) or min(launches.values()),
        efficiency=Efficiency(
            matmul=tuple(matmul),
            attention=tuple(attention),
            memory=(*memory, *_launches(results, launches)),
            fresh=_fresh(results, bandwidth),
        ),
    )


def _volume(shape: Shape) -> float:
    batch, m, n, k = shape
    return batch * m * n * k


def _attention(results: Results, dtype: str, peak: float) -> list[ShapeTable]:
    tables = []
    for (layout,), points in results.grouped("attention", dtype, parts=1).items():
        flops = {shape: attention_flops((1, *map(int, shape)), layout) for shape in points}
        spread = results.spread("attention", dtype, layout)
        tables.append(shape_table(points, flops, peak, 0.0, dtype, layout, spread))
    return tables


def _memory_tables(results: Results, bandwidth: float) -> list[MemoryTable]:
    tables = []
    for (op, kind, layout, dtype), measured in results.grouped("operator", parts=4).items():
        points = {read + written: seconds for (read, written), seconds in measured.items()}
        spread = results.spread("operator", op, kind, layout, dtype)
        for name, of_kind in ((op, ""), ("", STAND_FOR.get(op))):
            if of_kind is not None:
                tables.append(
                    memory_table(points, bandwidth, spread, kind=of_kind, op=name, dtype=dtype, layout=layout)
                )
    optimizer = {
        cast(float, read) + cast(float, written): seconds
        for (read, written), seconds in results.table("optimizer").items()
    }
    spread = results.spread("optimizer")
    for name, of_kind in (("aten._fused_adamw_", ""), ("", "optimizer")):
        tables.append(memory_table(optimizer, bandwidth, spread, kind=of_kind, op=name, dtype="", layout=""))
    return tables


def _launches(results: Results, launches: dict[str, float]) -> list[MemoryTable]:
    """Kinds whose calls have a launch cost different from the device's: products and views. Attention's is in its
    times.
    """
    views = [seconds for key, seconds in results.table("operator").items() if key[1] == "view"]
    found = [MemoryTable("matmul", dtype=dtype, launch=rounded(x)) for dtype, x in launches.items()]
    found.append(MemoryTable("attention", launch=0.0))
    return [*found, MemoryTable("view", launch=rounded(min(views)))] if views else found


def _fresh(results: Results, bandwidth: float) -> tuple[tuple[float, float], ...]:
    points = []
    for (size,), seconds in sorted(results.table("fresh").items(), key=lambda item: str(item[0]).zfill(20)):
        points.append((float(cast(int, size)), min(MOST, rounded(cast(int, size) / (bandwidth * seconds)))))
    return tuple(sorted(points))


# Fits a Device's tables to measured seconds: shares of the highest measured rate.
#
#     peak = max flops / (seconds − launch)               of products large enough to have settled     `peak_of`
#     share = flops / (peak · (seconds − launch))         `shape_table`
#     share = bytes / (bandwidth · (seconds − launch))    `memory_table`
#     launch = t₀ − b₀ · (t₁ − t₀) / (b₁ − b₀)            from the two smallest sizes, at least t₀ / 5     `_launch`
#
# A product's smooth curve is the best of a grid of half lengths; the logarithm of `best` for each is the mean over the
# points (`shape_table`).

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
    rows = tuple(cast(_Row, (*map(float, shape), rounded(share))) for shape, share in sorted(shares.items()))
    return ShapeTable(dtype, layout, rounded(best), half, rows, rounded(spread))


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
        (float(size), rounded(size / (bandwidth * net(points[size], launch)))) for size in sizes if size > 0
    )
    return MemoryTable(kind, op, dtype, layout, rounded(launch), rows or ((1.0, 1.0),), rounded(spread))


def _launch(points: Mapping[float, float]) -> float:
    smallest, *others = sorted(points)
    time = points[smallest]
    if smallest == 0 or not others:
        return time
    slope = max(0.0, (points[others[0]] - time) / (others[0] - smallest))
    return max(time / 5, time - slope * smallest)
