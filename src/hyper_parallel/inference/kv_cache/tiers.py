"""Blocks of the KV cache in offload tiers: equal slots, filled from the fastest tier on.

A block holds pages with all their layers, or of one layer the keys or the values of many pages. Blocks that a request
needs are pinned. Others are prefixes for requests to come: where a tier is full, they move down to the next one, and
from the last one they are dropped, in the order of an eviction policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.inference.kv_cache.eviction import SAMPLE, PredictedUse
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.offloading.tiers import Pending, Tier

Key = bytes
"""Digest of a page of a prompt (`page_pool`)."""


@dataclass(eq=False, slots=True)
class Block:
    """What lies in one slot of a tier."""

    level: int
    slot: int
    size: int
    """In bytes."""
    pins: int = 0
    """Requests that need it."""
    keys: list[Key] = field(default_factory=list)
    """Of the pages in it that prompts to come may find."""


@dataclass
class TierSlots:
    """One tier, cut into slots, and the bytes that were moved."""

    name: str
    tier: Tier
    free: list[int]
    slots: int
    written: int = 0
    read: int = 0


class KVTiers:
    """Slots of all tiers, the fastest first. `slot`: bytes of each."""

    def __init__(self, tiers: Mapping[str, Tier], sizes: KVCacheSizes, slot: int) -> None:
        """Reserves memory in each tier for the blocks that its pages make. Raises TierError if there is not enough."""
        self.slot = slot
        self.levels: list[TierSlots] = []
        self.idle: list[dict[Block, None]] = []
        """Of each level: blocks that no request needs, the least recently used first."""
        for name, tier in tiers.items():
            count = getattr(sizes, name) // sizes.block
            size = -(-slot // tier.align) * tier.align
            with outside_modes():  # this memory is not the device's
                tier.reserve(dict.fromkeys(range(count), size))
            self.levels.append(TierSlots(name, tier, list(range(count))[::-1], count))
            self.idle.append({})
        self.uses = PredictedUse()
        """Which idle block of a full tier goes first."""
        self._draws = random.Random(0)
        self.dropped: Callable[[Block], None] = lambda block: None
        """Called with an idle block that is lost."""
        self.move: Callable[[Block, int], None]
        """Copies a block to another level, where a slot is free; set by who has a buffer for it."""

    @property
    def slots(self) -> int:
        """Of all tiers together."""
        return sum(one.slots for one in self.levels)

    def place(self, count: int) -> Block | None:
        """A pinned block for `count` bytes; None where all slots are needed by requests."""
        for level in range(len(self.levels)):
            if self._clear(level):
                return Block(level, self.levels[level].free.pop(), count, pins=1)
        return None

    def begin_write(self, block: Block, x: Tensor) -> Pending:
        """Begin to write uint8 [block.size]."""
        found = self.levels[block.level]
        found.written += block.size
        with outside_modes():
            return found.tier.begin_write(block.slot, x)

    def begin_read(self, block: Block, x: Tensor) -> Pending:
        """Begin to read it into uint8 [block.size]."""
        found = self.levels[block.level]
        found.read += block.size
        with outside_modes():
            return found.tier.begin_read(block.slot, x)

    def pin(self, block: Block) -> None:
        """One more request needs it."""
        block.pins += 1
        self.idle[block.level].pop(block, None)

    def unpin(self, block: Block) -> None:
        """One request less needs it; without any, it is idle where prompts to come may find it, and else freed."""
        block.pins -= 1
        if block.pins:
            return
        if block.keys:
            self.idle[block.level][block] = None
        else:
            self.levels[block.level].free.append(block.slot)

    def touch(self, block: Block) -> None:
        """It was used."""
        if block in (idle := self.idle[block.level]):
            idle[block] = idle.pop(block)

    def forget(self) -> None:
        """Drop all idle blocks: they are of no use any more."""
        for level, idle in enumerate(self.idle):
            for block in list(idle):
                self._drop(level, block)

    def close(self) -> None:
        """Close the tiers."""
        for one in self.levels:
            one.tier.close()

    def _clear(self, level: int) -> bool:
        """Make sure that a slot of a level is free; False where requests need all."""
        found, idle = self.levels[level], self.idle[level]
        if not found.free and idle:
            block = self._victim(idle)
            if level + 1 < len(self.levels) and self._clear(level + 1):
                del idle[block]
                slot = block.slot
                self.move(block, level + 1)
                found.free.append(slot)
                self.idle[level + 1][block] = None
            else:
                self._drop(level, block)
        return bool(found.free)

    def _victim(self, idle: dict[Block, None]) -> Block:
        """Of a block with several pages, the first one that its prompts need decides."""
        oldest: dict[Hashable, Block] = {block.keys[0]: block for block in islice(idle, SAMPLE)}
        some = self._draws.sample(list(idle), min(SAMPLE, len(idle)))
        others: dict[Hashable, Block] = {block.keys[0]: block for block in some}
        return (oldest | others)[self.uses.first(oldest, list(others))]

    def _drop(self, level: int, block: Block) -> None:
        del self.idle[level][block]
        self.dropped(block)
        for key in block.keys:
            self.uses.left(key)
        self.levels[level].free.append(block.slot)
