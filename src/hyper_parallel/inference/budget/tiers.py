"""The tiers of a memory budget: opened once for weights, and once for the KV cache with the bytes that these leave.

The slots of a tier are reserved together, so that the two cannot share one. Weights leave a quarter of each tier where
the device has room for twice what stays on it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn

from hyper_parallel.compat import backend
from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.inference.kv_cache.plan import ALIGN
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.weights.tiers import movable
from hyper_parallel.inference.weights.units import Unit, units_of
from hyper_parallel.offloading.runtime.open_tiers import open_tiers
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.shard.sharded_model import is_sharded
from hyper_parallel.strategy.generation_memory import GenerationMemory

_FOR_CACHE = 0.25


def tiers_for_weights(memory: GenerationMemory) -> dict[str, Tier]:
    """All tiers of a budget. Raises TierError."""
    return _opened(memory.host, memory.flash, memory.pool, "weights")


def tiers_for_cache(memory: GenerationMemory, sizes: KVCacheSizes, page_bytes: int) -> dict[str, Tier]:
    """Those in which the KV cache has pages, as large as these. Raises TierError."""
    slot = -(-sizes.block * page_bytes // ALIGN) * ALIGN
    host, pool, flash = (
        getattr(sizes, name) // sizes.block * slot or None for name in ("host", "pool", "flash")
    )
    return _opened(host, memory.flash if flash else None, pool, "keys and values")


def units_in_tiers(
    model: nn.Module, tiers: Mapping[str, Tier], budget: int
) -> tuple[list[Unit], dict[str, int]]:
    """The modules that lie in tiers, as many as there is room for, and the bytes of each tier for them. None of a model
    that is spread over ranks."""
    room = {name: tier.capacity for name, tier in tiers.items()}
    if not tiers or is_sharded(model):
        return [], room
    units = units_of(model)
    total = sum(one.nbytes for one in model.parameters())
    part = {name: int((1 - _FOR_CACHE) * count) for name, count in room.items()}
    some = movable(units, tiers, part)
    if 2 * (total - sum(unit.bytes for unit in some)) <= budget:
        return some, part
    return movable(units, tiers, room), room


def _opened(host: int | None, flash: str | None, pool: int | None, what: str) -> dict[str, Tier]:
    shared = None if pool is None else (pool, f"generate-{os.getpid()}-{what}", f"generation, {what}")
    with outside_modes():  # this memory is not the device's
        return open_tiers(backend(), host, flash, shared)
