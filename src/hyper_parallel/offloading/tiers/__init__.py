"""Offload tiers with hard capacity limits: host memory, flash, and a pool shared by processes.

`Tier` is what they have in common; `measure` says how fast one is.
"""

from hyper_parallel.offloading.tiers.flash import FlashTier
from hyper_parallel.offloading.tiers.memory_tier import HostTier, PoolTier, begin_reads
from hyper_parallel.offloading.tiers.tier import Pending, Tier, Workplace, measure, measure_work

__all__ = [
    "FlashTier",
    "HostTier",
    "Pending",
    "PoolTier",
    "Tier",
    "Workplace",
    "begin_reads",
    "measure",
    "measure_work",
]
