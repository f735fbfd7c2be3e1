"""Host tier: pinned host memory."""

from __future__ import annotations

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers.memory_tier import MemoryTier
from hyper_parallel.offloading.tiers.tier import TIME_LIMIT
from hyper_parallel.proc import MEMORY, bytes_in
from hyper_parallel.units import format_bytes


class HostTier(MemoryTier):
    """One buffer, as large as the slots need, taken and touched by `reserve`; locked where the device wants it."""

    name = "host"

    def __init__(self, backend: Backend, capacity: int, time_limit: float = TIME_LIMIT) -> None:
        """`capacity`: bytes that `reserve` may take at most."""
        super().__init__(backend, capacity, time_limit)
        self._pages = backend.host_pages(0)

    @property
    def _memory(self) -> torch.Tensor:
        return self._pages.tensor

    def _resize(self, count: int) -> None:
        more, free = count - self._memory.numel(), bytes_in(MEMORY, "MemAvailable")
        if free is not None and more > free:
            raise TierError(
                f"the host tier needs {format_bytes(more)} of memory, and this machine has {format_bytes(free)} "
                "available; end what else runs here, or set memory.host lower and memory.flash to a folder"
            )
        try:
            self._pages.resize(count)
        except OSError as error:
            raise TierError(
                f"the system refused {format_bytes(more)} of memory for the host tier ({error.strerror or error}): "
                "raise the limit on this process's memory (ulimit -d, ulimit -v), or set memory.host lower and "
                "memory.flash to a folder"
            ) from error

    def _release(self) -> None:
        self._pages.close()
