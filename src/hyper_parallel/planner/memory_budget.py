"""Memory budgets of a planned run: bytes of each tier that a rank may use, from the cluster's description.

    device   (capacity − outside) / slack      as the planner's own limit (`cost_model.memory.fits`): what an allocator
                                               cannot give back, the driver and the collectives' buffers lie beside it
    host     HOST_PART · host / ranks          the rest is the system's, the data's and the framework's
    pool     HOST_PART · pool / ranks − host   only beyond the host's part, since a pool is made of hosts' memory

A strategy that keeps everything on the device needs no budget. `train` moves as little as the budget allows, whatever
shares the estimate had, so the budget states the limits and not the estimate's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import HOST_PART

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may use; 0 where there are none."""

    device: int
    host: int
    pool: int = 0

    def section(self, world: int) -> dict[str, str]:
        """The keys of `strategy.memory`; `pool` is of all ranks together."""
        found = {"device": self.device, "host": self.host, "pool": self.pool * world}
        return {tier: f"{bytes // MIB}MiB" for tier, bytes in found.items() if bytes >= MIB}


def memory_budget(cluster: Cluster, constants: Constants, needed: float = 0.0) -> MemoryBudget:
    """What each rank of a cluster may use. `needed`: bytes beside the device; a pool is used only beyond the host.

    The cluster describes a device; without a host its bytes are 0.
    """
    assert cluster.device is not None
    memory, host, pool = cluster.device.memory, cluster.host, cluster.pool
    device = (memory.bytes / memory.ranks - constants.outside) / constants.slack
    own = HOST_PART * host.bytes / host.ranks if host is not None else 0.0
    more = 0.0
    if pool is not None and needed > own:
        more = max(HOST_PART * pool.bytes / pool.ranks - own, 0.0)
    return MemoryBudget(max(int(device), 0), int(own), int(more))
