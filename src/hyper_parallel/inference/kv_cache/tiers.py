"""Offload tiers of the KV cache: equal slots for blocks, filled from the fastest tier on, eviction, and counters.

A block holds pages with all their layers, or of one layer the keys or the values of many pages. Blocks that a request
needs are pinned. Others are prefixes for requests to come: where a tier is full, the one that was used least recently
moves down to the next one, and from the last one it is dropped. The pages of a prompt come from the device with the
last one first (`page_pool`), so that a prefix stays longer than those that continue it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.kv_cache.tier_slots import TierSlots
from hyper_parallel.offloading.tiers import Pending, Tier
from hyper_parallel.units import format_bytes

Key = bytes
"""Digest of a page of a prompt (`page_pool`)."""


@dataclass(eq=False, slots=True)
class Block:
    """The content of one slot of a tier."""

    level: int
    slot: int
    size: int
    """In bytes."""
    pins: int = 0
    """Requests that need it."""
    keys: list[Key] = field(default_factory=list)
    """Of the pages in it that prompts to come may find."""


@dataclass(eq=False, slots=True)
class Group:
    """Tokens `first` to `end - 1` of a request: blocks by layer, for keys (0) and values (1)."""

    first: int
    end: int
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)


class KVTiers:
    """Slots of all tiers, the fastest first. `slot`: bytes of each."""

    def __init__(self, tiers: Mapping[str, Tier], sizes: KVCacheSizes, slot: int) -> None:
        """Reserves memory in each tier for the blocks that its pages make. Raises TierError if there is not enough."""
        self.slot = slot
        self.levels: list[TierSlots] = []
        self.counts: list[int] = []
        """Slots of each level."""
        self.idle: list[dict[Block, None]] = []
        """Of each level: blocks that no request needs, the least recently used first."""
        for name, tier in tiers.items():
            self.counts.append(getattr(sizes, name) // sizes.block)
            self.levels.append(TierSlots(name, tier))
            self.levels[-1].reserve(self.counts[-1], slot)
            self.idle.append({})
        self.dropped: Callable[[Block], None] = lambda block: None
        """Called with an idle block that is lost."""
        self.move: Callable[[Block, int], None]
        """Copies a block to another level, where a slot is free; set by who has a buffer for it."""

    @property
    def slots(self) -> int:
        """Slots of all tiers together."""
        return sum(self.counts)

    def place(self, count: int) -> Block | None:
        """A pinned block for `count` bytes; None where all slots are needed by requests."""
        for level in range(len(self.levels)):
            if self._clear(level):
                return Block(level, self.levels[level].take(self.slot), count, pins=1)
        return None

    def begin_write(self, block: Block, x: Tensor) -> Pending:
        """Begin to write uint8 [block.size]."""
        return self.levels[block.level].begin_write(block.slot, x)

    def begin_read(self, block: Block, x: Tensor) -> Pending:
        """Begin to read it into uint8 [block.size]."""
        return self.levels[block.level].begin_read([block.slot], x)

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
            self.levels[block.level].give_back(block.slot)

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
        slots, idle = self.levels[level], self.idle[level]
        free = slots.free[self.slot]
        if not free and idle:
            block = next(iter(idle))
            if level + 1 < len(self.levels) and self._clear(level + 1):
                del idle[block]
                slot = block.slot
                self.move(block, level + 1)
                slots.give_back(slot)
                self.idle[level + 1][block] = None
            else:
                self._drop(level, block)
        return bool(free)

    def _drop(self, level: int, block: Block) -> None:
        del self.idle[level][block]
        self.dropped(block)
        self.levels[level].give_back(block.slot)


@dataclass(frozen=True)
class TierReport:
    """One tier: its capacity, and the bytes that were written to it and read from it."""

    name: str
    bytes: int
    written: int
    read: int


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """Figures of a run. Tokens are counted once for each request and time."""

    tiers: tuple[TierReport, ...] = ()
    shared: int = 0
    """Tokens of prompts that were found on the device."""
    fetched: int = 0
    """Tokens of prompts that were found in a tier."""
    swapped: int = 0
    """Times that a request was swapped out to a tier."""
    recomputed: int = 0
    """Tokens that are computed again, since no tier had room for them."""
    streamed: int = 0
    """Tokens of contexts that were moved to a tier to be read from there."""

    pinned: int = 0
    """Pages of pinned prompts that are on the device."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Tiers that were set and moved no byte."""
        return tuple(one.name for one in self.tiers if not one.written + one.read)

    def progress(self) -> str:
        """For a progress line; empty where nothing happened."""
        parts = [
            f"{one.name} {format_bytes(one.written)} out, {format_bytes(one.read)} back"
            for one in self.tiers
            if one.written + one.read
        ]
        if self.swapped:
            parts.append(f"{self.swapped} swaps")
        if self.recomputed:
            parts.append(f"{self.recomputed} tokens computed again")
        return "; ".join(parts)
