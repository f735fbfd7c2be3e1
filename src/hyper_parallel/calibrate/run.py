"""Runs the rounds of a calibration and builds the cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hyper_parallel._version import __version__
from hyper_parallel.calibrate import workers
from hyper_parallel.calibrate.device import device_of
from hyper_parallel.calibrate.measure import fit as fit_collective
from hyper_parallel.calibrate.timing import Results, averaged
from hyper_parallel.calibrate.workers import Job
from hyper_parallel.cluster import MEASURED, Cluster, CollectiveTable, CopyTable, Device, Link, Shared, Tier
from hyper_parallel.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.compat import Backend

ALONE = ("fresh", "memory", "matmul", "attention", "operators", "tiers", "turns")
TOGETHER = ("fresh", "memory", "matmul", "attention", "operators", "turns", "collectives")
TURNS = ("turns", "collectives")


@dataclass(frozen=True)
class Settings:
    """Options of `hyper-parallel calibrate`."""

    workers: int = 4
    """The largest number of workers that compute on this machine at once."""
    level: str = "full"
    """`full`, `quick` (fewer shapes and sizes) or `tiny` (a few, for tests)."""
    device: str = "auto"
    folder: Path = Path()
    """The folder in which flash is measured."""


def calibrate(
    settings: Settings, progress: Callable[[str], None], parts: Callable[[int], None] | None = None
) -> Cluster:
    """Measure this machine. `progress` is called with each part as it begins, and `parts` before with how many there
    will be. Raises LaunchError if workers fail."""
    from hyper_parallel import compat

    if settings.workers < 1:
        raise ConfigError(f"--workers must be at least 1; got {settings.workers}")
    backend = compat.backend(settings.device)
    cores = _cores()

    def round_(world: int, parts: tuple[str, ...], level: str) -> Results:
        threads = max(1, cores // world)
        job = Job(world, threads, backend.name, level, parts, str(settings.folder))
        said = f"{world} worker{'s' if world > 1 else ''}"
        found = averaged(workers.run(job, lambda part: progress(f"{said}: {part}")))
        for note in found.notes:
            progress(f"{said}: {note}")
        return found

    own = backend.device_count() >= settings.workers
    worlds = [n for n in _worlds(settings.workers) if backend.devices_for(n)]
    if parts is not None:
        parts(len(ALONE) + sum(len(_together(world, own, cores)) for world in worlds))
    alone = round_(1, ALONE, settings.level)
    peaks = {name: _published(backend, name) for name in ("float32", "bfloat16")}
    memory = float(backend.memory_total())
    device = device_of(alone, backend.device_name(), memory, peaks)
    together: dict[int, Results] = {}
    shared: dict[int, Shared] = {}
    fitting = max([1, *(n for n in worlds if n <= cores)])
    for world in worlds:
        if own:
            together[world] = round_(
                world, _together(world, own, cores), "shared" if settings.level == "full" else settings.level
            )
            continue
        level = "shared" if settings.level == "full" else settings.level
        together[world] = found = round_(world, _together(world, own, cores), level)
        base = alone if fitting == 1 else together[fitting]
        slower = None if world <= cores else _slower(base, found)
        if slower is None:
            each = device_of(found, device.name, memory, peaks)
        else:
            each = (device if fitting == 1 else shared[fitting].device).slowed(slower)
        each = replace(each, memory=replace(each.memory, ranks=world))
        shared[world] = Shared(each, _collectives(found), slower)
    largest = together.get(max(worlds, default=0))
    tables = _collectives(largest) if largest else ()
    rings = [table for table in tables if table.kind == "all_reduce" and table.ranks == max(worlds)]
    copies = _copies(alone)
    return Cluster(
        device=device,
        links={"node": Link("node", rings[0].bandwidth, rings[0].latency)} if rings else {},
        host=_tier("host", float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "device", copies),
        flash=_tier("flash", float(shutil.disk_usage(settings.folder).total), "host", copies),
        source=f"measured by hyper-parallel {__version__} calibrate, {cores} cores, PyTorch {_torch()}",
        name=MEASURED,
        collectives=tables if own else (),
        copies=copies,
        shared=shared,
    )


def _together(world: int, own: bool, cores: int) -> tuple[str, ...]:
    """The parts that workers measure at once. `own`: each has a device of its own."""
    if own:
        return ("collectives",)
    return TOGETHER if world <= cores else TURNS


def _worlds(workers: int) -> list[int]:
    """2, 4, 8 … below the number of workers, and the number itself."""
    found = [n for n in (2**power for power in range(1, 16)) if n < workers]
    return [*found, workers] if workers > 1 else []


def _slower(base: Results, found: Results) -> float:
    """The slowdown of the operators of `turns`, as a geometric mean."""
    ratio = 1.0
    times = base.table("turns")
    for key, seconds in times.items():
        ratio *= found.seconds[("turns", *key)] / seconds
    return float(f"{max(1.0, ratio ** (1 / len(times))):.5g}")


def _collectives(results: Results) -> tuple[CollectiveTable, ...]:
    grouped: dict[tuple[str, int], dict[int, float]] = {}
    for (kind, ranks, size), seconds in results.table("collective").items():
        grouped.setdefault((cast(str, kind), cast(int, ranks)), {})[cast(int, size)] = seconds
    tables = []
    for (kind, ranks), points in grouped.items():
        latency, bandwidth, residual = (float(f"{x:.5g}") for x in fit_collective(kind, ranks, points))
        rows = tuple((float(size), float(f"{points[size]:.5g}")) for size in sorted(points))
        spread = float(f"{results.spread('collective', kind, ranks):.5g}")
        tables.append(CollectiveTable(kind, "node", ranks, rows, latency, bandwidth, residual, spread))
    return tuple(tables)


def _copies(results: Results) -> tuple[CopyTable, ...]:
    grouped: dict[tuple[str, str], dict[int, float]] = {}
    for (source, target, size), seconds in results.table("copy").items():
        grouped.setdefault((cast(str, source), cast(str, target)), {})[cast(int, size)] = seconds
    return tuple(
        CopyTable(
            source,
            target,
            tuple((float(size), float(f"{points[size]:.5g}")) for size in sorted(points)),
            float(f"{results.spread('copy', source, target):.5g}"),
        )
        for (source, target), points in grouped.items()
    )


def _tier(name: str, bytes: float, beside: str, copies: tuple[CopyTable, ...]) -> Tier | None:
    """A tier with the bandwidths of its largest copies from and to the adjacent tier."""
    rates = {}
    for table in copies:
        size, seconds = table.points[-1]
        rates[table.source, table.target] = float(f"{size / seconds:.5g}")
    read, write = rates.get((name, beside)), rates.get((beside, name))
    return Tier(name, bytes, read, write) if read and write else None


def _published(backend: Backend, dtype: str) -> float | None:
    import torch

    return backend.peak_flops(getattr(torch, dtype))


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["Device", "Settings", "calibrate"]
