"""Opens the offload tiers of this machine and measures their bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link
from hyper_parallel.cluster.device import Tier as Memory
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.compat import Backend
from hyper_parallel.offloading.schedule.problem import OffloadTier
from hyper_parallel.offloading.tiers import (
    FlashTier,
    HostTier,
    PoolTier,
    Tier,
    Workplace,
    measure,
    measure_work,
)
from hyper_parallel.shard.process_mesh import planning_cluster
from hyper_parallel.strategy import Strategy

_MEASURED = 32 << 20
"""Bytes of the copies by which a tier is measured."""

GUESS = Cluster(
    device=Device(
        "unknown", {"float32": 5e10}, {"float32": 5e9}, Memory("device", 1e12, 1e10, 1e10), launch=5e-6
    ),
    links={"node": Link("node", 1e9, 1e-4)},
    source="a plain guess",
    name="unknown",
)
"""A few processor cores: what is known of a machine that nobody described."""


def machine_of(backend: Backend) -> Cluster:
    """By what moves are planned where nobody names a cluster: the device's preset, else a plain guess."""
    known = preset_of(backend.device_name())
    return GUESS if known is None else Cluster.preset(known)


def open_tiers(
    backend: Backend,
    host: int | None = None,
    flash: str | Path | None = None,
    pool: tuple[int, str, str] | None = None,
) -> dict[str, Tier]:
    """The tiers by their names, the fastest first.

    `host`: bytes. `flash`: a folder. `pool`: bytes of all ranks together, what they call it, and what this one is
    called. Raises TierError.
    """
    tiers: dict[str, Tier] = {}
    if host is not None:
        tiers["host"] = HostTier(backend, host)
    if pool is not None:
        tiers["pool"] = PoolTier(backend, *pool)
    if flash is not None:
        tiers["flash"] = FlashTier(Path(flash), backend)
    return tiers


def measured(
    tiers: Mapping[str, Tier], backend: Backend, budget: int, ranks: int = 1, *, updates: bool
) -> tuple[OffloadTier, ...]:
    """Each tier's capacity for this rank (its share of the pool) and its measured bandwidth.

    `budget`: bytes of the device; copies of at most a quarter of it are measured. `updates`: also measure how fast the
    host runs optimizer updates in each tier.
    """
    spaces = []
    for name, tier in tiers.items():
        share = tier.capacity // ranks if name == "pool" else tier.capacity
        out, back = measure(tier, backend, min(_MEASURED, share, max(budget // 4, 1)))
        work = None
        if updates and isinstance(tier, Workplace):
            work = measure_work(tier, backend, min(_MEASURED, share, budget))
        spaces.append(OffloadTier(name, share, out, back, work))
    return tuple(spaces)


def cluster_for(strategy: Strategy, kind: str) -> Cluster:
    """By what the moves of a run on this kind of device are planned."""
    section: Literal["overlap", "memory"] = "overlap" if strategy.memory.cluster is None else "memory"
    return planning_cluster(strategy, section, kind) or GUESS
