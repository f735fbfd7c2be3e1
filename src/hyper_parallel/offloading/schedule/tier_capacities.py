"""Tier capacities and rates that a strategy's memory section offers on a described cluster."""

from __future__ import annotations

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.units import format_bytes

_MANY = 1 << 40
"""Bytes of a large copy. A link's bandwidth is this size over the copy's time beyond its latency."""


def spaces_of(memory: Memory, cluster: Cluster, ranks: int) -> tuple[OffloadTier, ...]:
    """The tiers that the strategy names, the fastest first, as each of `ranks` ranks finds them when all copy at once.

    Raises BudgetError for a tier that the cluster does not describe, or that is smaller than what all ranks may use.
    """
    found = []
    given = {
        "host": (memory.host, cluster.host),
        "pool": (None if memory.pool is None else memory.pool // ranks, cluster.pool),
        "flash": (None if memory.flash is None else 0, cluster.flash),
    }
    for name, (asked, tier) in given.items():
        if asked is None:
            continue
        if tier is None:
            there = cluster.name or cluster.source
            raise BudgetError(
                f"strategy.memory.{name}: the cluster {there!r} describes no {name}; choose another cluster, or leave "
                f"{name} out"
            )
        share = int(tier.bytes / min(ranks, tier.ranks))
        if asked > share:
            raise BudgetError(
                f"strategy.memory.{name}: {format_bytes(asked)} for each rank, and the {min(ranks, tier.ranks)} that "
                f"share the {name} of cluster {cluster.name!r} have {format_bytes(share)} each; ask for less"
            )
        found.append(
            OffloadTier(
                name,
                asked or share,
                _rate(cluster, "device", name, ranks),
                _rate(cluster, name, "device", ranks),
            )
        )
    return tuple(found)


def _rate(cluster: Cluster, source: str, target: str, ranks: int) -> Rate:
    latency = cluster.copy_seconds(source, target, 0, ranks)
    return Rate(latency, _MANY / (cluster.copy_seconds(source, target, _MANY, ranks) - latency))
