"""Tables of a calibrated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hyper_parallel.cluster import Cluster, CollectiveTable, CopyTable, Device, MemoryTable, ShapeTable
from hyper_parallel.cluster.efficiency import attention_flops
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import sheet_text, wrapped
from hyper_parallel.units import format_bytes
from hyper_parallel.workload import Work

QUIET = 0.2
"""The spread above which a table counts as disturbed by other load."""


@dataclass(frozen=True)
class _Row:
    """A line of the table of rates."""

    what: str
    tables: tuple[ShapeTable | MemoryTable, ...]
    """The tables whose spread is shown."""
    shown: Callable[[Device], str]


def render(cluster: Cluster, width: int = 100) -> str:
    """Measured rates of one worker and of several at once, each with its spread; collectives; copies."""
    found = [_rates(cluster)]
    for world, shared in cluster.shared.items():
        found.append(_collectives(f"Collectives of {world} workers", shared.collectives))
    if cluster.collectives:
        found.append(_collectives("Collectives", cluster.collectives))
    if cluster.copies:
        found.append(_copies(cluster.copies))
    blocks = [f"{wrapped(sheet.title, width)}\n{sheet_text(sheet, width)}" for sheet in found]
    if warning := _busy(cluster):
        blocks.append(wrapped(warning, width))
    return "\n".join(blocks)


def _busy(cluster: Cluster) -> str:
    """Advice if most figures were disturbed; empty otherwise."""
    assert cluster.device is not None, "a calibrated cluster has a device"
    efficiency = cluster.device.efficiency
    spreads = [
        table.spread
        for tables in (efficiency.matmul, efficiency.attention, efficiency.memory)
        for table in tables
        if table.spread is not None
    ]
    disturbed = sum(spread > QUIET for spread in spreads)
    if disturbed * 4 <= len(spreads):
        return ""
    return (
        f"warning: {disturbed} of {len(spreads)} tables of one worker spread by more than {100 * QUIET:.0f}%: "
        "something else computes here, and predictions will be off. Run it again when nothing does."
    )


def _rates(cluster: Cluster) -> Sheet:
    assert cluster.device is not None, "a calibrated cluster has a device"
    devices = {1: cluster.device, **{n: shared.device for n, shared in cluster.shared.items()}}
    columns = ["", "alone"]
    for world in list(devices)[1:]:
        estimated = cluster.shared[world].slower is not None
        columns.append(f"each of {world}" + (" (estimate)" if estimated else ""))
    rows = tuple(
        (row.what, *map(row.shown, devices.values()), _spread(row.tables)) for row in _rows(cluster.device)
    )
    # The largest world and one worker say most of what lies between.
    between = tuple(columns[2:-1])
    title = f"{cluster.device.name}: what a worker reaches"
    return Sheet(title, (*columns, "spread"), rows, drop=between)


def _rows(device: Device) -> Iterable[_Row]:
    efficiency = device.efficiency
    for dtype in device.matrix:
        products = tuple(table for table in efficiency.matmul if table.dtype == dtype)
        for size in (64, 1024):
            work = Work.of_matmul(size, size, size, dtype=dtype, layout="nt")
            yield _Row(f"matmul {size}³ {dtype}", products, _flops(work, work.flops))
        kernels = tuple(table for table in efficiency.attention if table.dtype == dtype)
        for direction in ("forward", "backward"):
            shape = (1, 8, 512, 512, 64)
            work = Work("attention", shape=shape, dtype=dtype, layout=direction)
            yield _Row(
                f"attention 512² {direction} {dtype}",
                kernels,
                _flops(work, attention_flops(shape, direction)),
            )
    for op in ("aten.add", "aten.exp", "aten.silu", "aten._softmax", "aten.clone"):
        tables = tuple(table for table in efficiency.memory if table.op == op and table.dtype == "float32")
        for size in (2**20, 2**25) if tables else ():
            work = Work("elementwise", read=size / 2, written=size / 2, op=op)
            yield _Row(f"{op.removeprefix('aten.')} {format_bytes(size)}", tables, _bytes(work, size))
    optimizer = tuple(table for table in efficiency.memory if table.kind == "optimizer")
    size = 2**26
    work = Work("optimizer", read=size * 4 / 7, written=size * 3 / 7)
    yield _Row("AdamW 64.0 MiB", optimizer, _bytes(work, size))
    yield _Row("copying, beyond caches", (), lambda device: _rate(device.memory.read))
    fresh = Work("elementwise", fresh=2**25)
    yield _Row(
        "first touch of 32.0 MiB", (), lambda device: _rate(2**25 / max(device.fresh_seconds(fresh), 1e-12))
    )
    yield _Row("launch of an operator", (), lambda device: f"{device.launch * 1e6:.1f} µs")


def _flops(work: Work, flops: float) -> Callable[[Device], str]:
    return lambda device: f"{flops / device.seconds(work) / 1e9:.1f} GFLOP/s"


def _bytes(work: Work, moved: float) -> Callable[[Device], str]:
    return lambda device: _rate(moved / device.seconds(work))


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s" if bytes_per_second < 1e12 else "free"


def _spread(tables: Iterable[ShapeTable | MemoryTable | CollectiveTable | CopyTable]) -> str:
    found = [table.spread for table in tables if table.spread is not None]
    return f"± {100 * sum(found) / len(found):.0f}%" if found else ""


def _collectives(title: str, found: Sequence[CollectiveTable]) -> Sheet:
    """One line for each kind and number of ranks; all were measured at the same sizes."""
    sizes = [format_bytes(found[0].points[end][0]) for end in (0, -1)] if found else ["", ""]
    rows = []
    for each in found:
        first, last = (each.points[end][1] for end in (0, -1))
        rows.append(
            (
                each.kind,
                str(each.ranks),
                f"{first * 1e6:.0f} µs",
                f"{last * 1e3:.2f} ms",
                f"{each.latency * 1e6:.0f} µs",
                _rate(each.bandwidth),
                f"{100 * each.residual:.0f}%",
                _spread([each]),
            )
        )
    columns = ("", "ranks", *sizes, "α", "β", "fit off by", "spread")
    return Sheet(title, columns, tuple(rows), drop=("fit off by", "spread"))


def _copies(found: Sequence[CopyTable]) -> Sheet:
    sizes = [format_bytes(found[0].points[end][0]) for end in (0, -1)]
    rows = tuple(
        (
            f"{each.source} → {each.target}",
            *(_rate(size / seconds) for size, seconds in (each.points[0], each.points[-1])),
            _spread([each]),
        )
        for each in found
    )
    return Sheet("Copies between memories", ("", *sizes, "spread"), rows)
