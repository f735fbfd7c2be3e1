"""Pool tier: one capacity that several processes of a machine share by leases."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.offloading.tiers.memory_tier import MemoryTier
from hyper_parallel.offloading.tiers.shared_lease import OWN, PREFIX, Lease
from hyper_parallel.offloading.tiers.tier import TIME_LIMIT

SHARED = Path("/dev/shm")
"""Where the system keeps files in memory."""


class PoolTier(MemoryTier):
    """This process's lease of a pool: on one machine the host's memory, in files of a memory file system."""

    name = "pool"

    def __init__(
        self,
        backend: Backend,
        capacity: int,
        pool: str,
        holder: str = "a process",
        folder: Path = SHARED,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        """`pool`: the same name in all processes that share, and in no others. `capacity`: of all of them together.

        `holder`: what this process is called in the messages of the others. Raises TierError.
        """
        super().__init__(backend, capacity, time_limit)
        where = folder / OWN / (PREFIX + re.sub(r"[^A-Za-z0-9_.]", "_", pool))
        self._lease = Lease(where, capacity, re.sub(r"[^A-Za-z0-9_. ]", "_", holder))
        self._unpin = backend.pin(self._lease.tensor)

    @property
    def _memory(self) -> torch.Tensor:
        return self._lease.tensor

    def _resize(self, count: int) -> None:
        self._unpin()
        try:
            self._lease.resize(count)
        finally:
            self._unpin = self._backend.pin(self._lease.tensor)

    def _release(self) -> None:
        self._unpin()
        self._lease.close()
