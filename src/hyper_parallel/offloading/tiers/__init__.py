"""Offload tiers with hard capacity limits: host memory, flash, and a pool shared by processes.

`Tier` is what they have in common; `measure` says how fast one is.
"""

from hyper_parallel.offloading.tiers.bandwidth import measure, measure_work
from hyper_parallel.offloading.tiers.batched_reads import begin_reads
from hyper_parallel.offloading.tiers.flash import FlashTier
from hyper_parallel.offloading.tiers.host import HostTier
from hyper_parallel.offloading.tiers.pool import PoolTier
from hyper_parallel.offloading.tiers.tier import Pending, Tier, Workplace

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
