"""Reads of several slots as one copy: a thread, or a stream, is given work once instead of once a slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel.offloading.tiers.memory_tier import MemoryTier
from hyper_parallel.offloading.tiers.tier import Pending, Tier


class _Several:
    """Copies that are waited for together."""

    def __init__(self, copies: Sequence[Pending]) -> None:
        self._copies = copies

    def wait(self) -> float:
        """As `Pending`."""
        return sum(one.wait() for one in self._copies)

    def done(self) -> bool:
        """As `Pending`."""
        return all(one.done() for one in self._copies)

    @property
    def seconds(self) -> float | None:
        """As `Pending`: nobody knows, since they run beside one another."""
        return None


def begin_reads(tier: Tier, slots: Sequence[int], x: torch.Tensor) -> Pending:
    """Begin to copy to `x`, uint8 [k, n] on the device, the n bytes that were last written to each of k slots."""
    if isinstance(tier, MemoryTier):
        return tier.begin_reads(slots, x)
    return _Several([tier.begin_read(slot, part) for slot, part in zip(slots, x, strict=True)])
