"""The machine as a run with a memory budget of its own sees it: the budget's bytes in each tier.

A budget counts live bytes of the step, so that neither an allocator's loss nor a driver's buffers come on top of it:
the device's memory is set to what leaves the budget after both (`cost_model.memory.fits`). The tiers that the budget
names count as one, at the rate of the slowest that is needed; flash, which has no size, counts as all of its disk.
"""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.cluster import Cluster, Link, Tier
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import HOST_PART
from hyper_parallel.strategy.memory import Memory

_COPY = 1 << 26
"""Bytes of the copy by which a tier's rate is read off."""
_FLASH = 1e15
"""Bytes of a disk that nobody described."""
_RATE = 1e9
"""B/s of a tier that nobody described: an estimate, as of a plain disk."""


def budgeted(memory: Memory, cluster: Cluster, world: int, constants: Constants) -> Cluster:
    """The cluster whose device holds the budget, and whose host holds what the budget's tiers do, for each rank."""
    assert memory.device is not None, "a budget"
    assert cluster.device is not None, "a described device"
    there = cluster.device.memory
    device = min(there.bytes / there.ranks, memory.device * constants.slack + constants.outside)
    bytes, rate = 0.0, float("inf")
    for name, given in (("host", memory.host), ("pool", memory.pool and memory.pool / world)):
        if given:
            bytes, rate = bytes + given, min(rate, _rate(cluster, name, world))
    if memory.flash is not None:
        bytes += cluster.flash.bytes / min(world, cluster.flash.ranks) if cluster.flash else _FLASH
        rate = min(rate, _rate(cluster, "flash", world))
    return replace(
        cluster,
        device=replace(cluster.device, memory=replace(there, bytes=device, ranks=1)),
        host=Tier("host", bytes / HOST_PART, 2 * rate, 2 * rate),
        pool=None,
        links={**cluster.links, "host": Link("host", rate, 0.0)},
    )


def _rate(cluster: Cluster, tier: str, ranks: int) -> float:
    """B/s between a device and a tier, with all ranks copying at once."""
    try:
        ways = [cluster.copy_seconds(*way, _COPY, ranks) for way in (("device", tier), (tier, "device"))]
    except ConfigError:
        return _RATE
    return _COPY / max(ways)
