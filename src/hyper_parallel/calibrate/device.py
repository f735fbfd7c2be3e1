"""Converts one worker's measurements into a `Device`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from hyper_parallel.calibrate import fit
from hyper_parallel.calibrate.results import Results
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
        points = _by_layout(results, "matmul", str(dtype))
        flops = {shape: 2.0 * _volume(shape) for layout in points.values() for shape in layout}
        launch = launches[str(dtype)]
        measured = max(fit.peak_of(layout, flops, launch) for layout in points.values())
        matrix[str(dtype)] = peak = peaks.get(str(dtype)) or float(f"{measured:.5g}")
        for layout, seconds_by in points.items():
            spread = results.spread("matmul", dtype, layout)
            table = fit.shape_table(seconds_by, flops, peak, launch, str(dtype), layout, spread)
            between = _by_layout(results, "between", str(dtype)).get(layout, {})
            off = [
                abs(launch + 2.0 * _volume(s) / (peak * table.share(s)) - t) / t for s, t in between.items()
            ]
            matmul.append(replace(table, residual=float(f"{sum(off) / len(off):.5g}")) if off else table)
        attention += _attention(results, str(dtype), peak)
    return Device(
        name,
        matrix=matrix,
        vector={"float32": float(f"{2**20 / results.seconds[('vector',)]:.5g}")},
        memory=Tier("device", memory_bytes, float(f"{bandwidth:.5g}"), float(f"{bandwidth:.5g}")),
        launch=(adds[0].launch if adds else None) or min(launches.values()),
        efficiency=Efficiency(
            matmul=tuple(matmul),
            attention=tuple(attention),
            memory=(*memory, *_launches(results, launches)),
            fresh=_fresh(results, bandwidth),
        ),
    )


def _by_layout(results: Results, table: str, dtype: str) -> dict[str, dict[fit.Shape, float]]:
    """Layout to seconds by shape."""
    found: dict[str, dict[fit.Shape, float]] = {}
    for (layout, *shape), seconds in results.table(table, dtype).items():
        found.setdefault(str(layout), {})[cast(fit.Shape, tuple(shape))] = seconds
    return found


def _volume(shape: fit.Shape) -> float:
    batch, m, n, k = shape
    return batch * m * n * k


def _attention(results: Results, dtype: str, peak: float) -> list[ShapeTable]:
    tables = []
    for layout, points in _by_layout(results, "attention", dtype).items():
        flops = {shape: attention_flops((1, *map(int, shape)), layout) for shape in points}
        spread = results.spread("attention", dtype, layout)
        tables.append(fit.shape_table(points, flops, peak, 0.0, dtype, layout, spread))
    return tables


def _memory_tables(results: Results, bandwidth: float) -> list[MemoryTable]:
    grouped: dict[tuple[Any, ...], dict[float, float]] = {}
    for (op, kind, layout, dtype, read, written), seconds in results.table("operator").items():
        moved = cast(float, read) + cast(float, written)
        grouped.setdefault((op, kind, layout, dtype), {})[moved] = seconds
    tables = []
    for (op, kind, layout, dtype), points in grouped.items():
        spread = results.spread("operator", op, kind, layout, dtype)
        for name, of_kind in ((op, ""), ("", STAND_FOR.get(op))):
            if of_kind is not None:
                tables.append(
                    fit.memory_table(
                        points, bandwidth, spread, kind=of_kind, op=name, dtype=dtype, layout=layout
                    )
                )
    optimizer = {
        cast(float, read) + cast(float, written): seconds
        for (read, written), seconds in results.table("optimizer").items()
    }
    spread = results.spread("optimizer")
    for name, of_kind in (("aten._fused_adamw_", ""), ("", "optimizer")):
        tables.append(
            fit.memory_table(optimizer, bandwidth, spread, kind=of_kind, op=name, dtype="", layout="")
        )
    return tables


def _launches(results: Results, launches: dict[str, float]) -> list[MemoryTable]:
    """Kinds whose calls have a launch cost different from the device's: products and views. Attention's is in its
    times.
    """
    views = [seconds for key, seconds in results.table("operator").items() if key[1] == "view"]
    found = [MemoryTable("matmul", dtype=dtype, launch=float(f"{x:.5g}")) for dtype, x in launches.items()]
    found.append(MemoryTable("attention", launch=0.0))
    return [*found, MemoryTable("view", launch=float(f"{min(views):.5g}"))] if views else found


def _fresh(results: Results, bandwidth: float) -> tuple[tuple[float, float], ...]:
    points = []
    for (size,), seconds in sorted(results.table("fresh").items(), key=lambda item: str(item[0]).zfill(20)):
        points.append(
            (float(cast(int, size)), min(MOST, float(f"{cast(int, size) / (bandwidth * seconds):.5g}")))
        )
    return tuple(sorted(points))
