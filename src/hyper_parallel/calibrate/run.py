"""Runs the rounds of a calibration and builds the cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hyper_parallel import compat, proc
from hyper_parallel._version import __version__
from hyper_parallel.calibrate import workers
from hyper_parallel.calibrate.device import device_of
from hyper_parallel.calibrate.measure import fit as fit_collective
from hyper_parallel.calibrate.timing import Job, Results, averaged, rounded
from hyper_parallel.cluster import MEASURED, Cluster, CollectiveTable, CopyTable, Link, Shared, Tier
from hyper_parallel.errors import ConfigError

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
    if settings.workers < 1:
        raise ConfigError(f"--workers must be at least 1; got {settings.workers}")
    backend = compat.backend(settings.device)
    cores = proc.cores()

    def round_(world: int, parts: tuple[str, ...], level: str) -> Results:
        threads = max(1, cores // world)
        job = Job(world, threads, backend.name, level, parts, str(settings.folder))
        heading = f"{world} worker{'s' if world > 1 else ''}"
        found = averaged(workers.run(job, lambda part: progress(f"{heading}: {part}")))
        for note in found.notes:
            progress(f"{heading}: {note}")
        return found

    own = backend.device_count() >= settings.workers
    worlds = [n for n in _worlds(settings.workers) if backend.devices_for(n)]
    if parts is not None:
        parts(len(ALONE) + sum(len(_together(world, own, cores)) for world in worlds))
    alone = round_(1, ALONE, settings.level)
    peaks = {name: backend.peak_flops(getattr(torch, name)) for name in ("float32", "bfloat16")}
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
        source=f"measured by hyper-parallel {__version__} calibrate, {cores} cores, PyTorch {torch.__version__}",
        name=MEASURED,
        collectives=tables if own else (),
        copies=copies,
        shared=shared,
    )


def _together(world: int, own: bool, cores: int) -> tuple[str, ...]:
    """The parts that workers measure at once. `own`: each has its own device."""
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
    return rounded(max(1.0, ratio ** (1 / len(times))))


def _collectives(results: Results) -> tuple[CollectiveTable, ...]:
    tables = []
    for (kind, ranks), points in results.grouped("collective", parts=2).items():
        latency, bandwidth, residual = map(rounded, fit_collective(kind, ranks, points))
        spread = rounded(results.spread("collective", kind, ranks))
        tables.append(
            CollectiveTable(kind, "node", ranks, _rows(points), latency, bandwidth, residual, spread)
        )
    return tuple(tables)


def _copies(results: Results) -> tuple[CopyTable, ...]:
    return tuple(
        CopyTable(source, target, _rows(points), rounded(results.spread("copy", source, target)))
        for (source, target), points in results.grouped("copy", parts=2).items()
    )


def _rows(points: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds), the smallest first."""
    return tuple((float(size), rounded(points[size])) for size in sorted(points))


def _tier(name: str, bytes: float, beside: str, copies: tuple[CopyTable, ...]) -> Tier | None:
    """A tier with the bandwidths of its largest copies from and to the adjacent tier."""
    rates = {}
    for table in copies:
        size, seconds = table.points[-1]
        rates[table.source, table.target] = rounded(size / seconds)
    read, write = rates.get((name, beside)), rates.get((beside, name))
    return Tier(name, bytes, read, write) if read and write else None
