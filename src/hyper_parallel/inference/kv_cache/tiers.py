"""Offload tiers of the KV cache: equal slots for blocks, filled from the fastest tier on, eviction, and counters.

A block holds pages with all their layers, or of one layer the keys or the values of many pages. Blocks that a request
needs are pinned. Others are prefixes for requests to come: where a tier is full, they move down to the next one, and
from the last one they are dropped, in the order of an eviction policy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

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
        self.uses = PredictedUse()
        """Which idle block of a full tier goes first."""
        self._draws = random.Random(0)
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
            block = self._victim(idle)
            if level + 1 < len(self.levels) and self._clear(level + 1):
                del idle[block]
                slot = block.slot
                self.move(block, level + 1)
                slots.give_back(slot)
                self.idle[level + 1][block] = None
            else:
                self._drop(level, block)
        return bool(free)

    def _victim(self, idle: dict[Block, None]) -> Block:
        """The block to evict; in one with several pages, the first one that its prompts need decides."""
        oldest: dict[Hashable, Block] = {block.keys[0]: block for block in islice(idle, SAMPLE)}
        some = self._draws.sample(list(idle), min(SAMPLE, len(idle)))
        others: dict[Hashable, Block] = {block.keys[0]: block for block in some}
        return (oldest | others)[self.uses.first(oldest, list(others))]

    def _drop(self, level: int, block: Block) -> None:
        del self.idle[level][block]
        self.dropped(block)
        for key in block.keys:
            self.uses.left(key)
        self.levels[level].give_back(block.slot)


# Eviction by predicted next use: the prefix with the least retention index goes first.
#
# How long a prefix waits for its next use is learned from those of its class, used or not: a life table over ages a, on
# a logarithmic scale, with hazards h(a) = uses at age a / prefixes that reached it (Kaplan and Meier 1958, so that
# those still waiting count). The index of a prefix of age a is the best rate of uses that keeping it for a while can
# have,
#
#     index(a) = max over ends e of  P(used before e | a) / E(time kept until used or e | a)
#
# which is Gittins' index (1979) of a page that pays 1 when it is used. The class is the prefix's own mean interval
# where it was used `KNOWN` times or more, else how often it and the prefix that it continues were used. Time is counted
# in requests: ranks that run the same requests evict the same prefixes. A prefix goes before those that it continues.

KNOWN = 3
_AGES = 48
_REBUILD = 64
SAMPLE = 24
_CLEAR = 0.5


@dataclass
class _Life:
    """The history of one prefix, in the cache or not."""

    parent: Hashable | None
    last: int
    uses: int = 1
    interval: float = 0.0
    """Mean number of requests between uses, of late."""
    cached: bool = False
    kept: int = 0
    """Prefixes in the cache that continue it, of those that are remembered."""


@dataclass
class _Table:
    """Table of one class: uses by age, and the index by age."""

    uses: list[float] = field(default_factory=lambda: [0.0] * _AGES)
    index: list[float] = field(default_factory=lambda: [math.inf] * _AGES)


class PredictedUse:
    """Decides which prefixes stay, from the requests that it is shown."""

    def __init__(self, most: int = 1 << 16, seed: int = 0) -> None:
        """`most`: prefixes that are remembered, in the cache or not."""
        self._most = most
        self._lives: dict[Hashable, _Life] = {}
        self._tables: dict[tuple[int, ...], _Table] = {}
        self._draws = random.Random(seed)
        self._now = 0

    def used(self, keys: Sequence[Hashable]) -> None:
        """A request came whose prompt has these prefixes, each the continuation of the one before."""
        self._now += 1
        parent: Hashable | None = None
        for key in keys:
            life = self._lives.pop(key, None)
            if life is None:
                life = _Life(parent, self._now)
            else:
                wait = self._now - life.last
                self._table(life).uses[_age(wait)] += 1
                weight = 1 / min(life.uses, 4)
                life.interval += weight * (wait - life.interval)
                life.uses, life.last = life.uses + 1, self._now
            self._lives[key] = life
            parent = key
        for key in list(islice(self._lives, max(len(self._lives) - self._most, 0))):
            self._count(key, False)
            del self._lives[key]
        if self._now % _REBUILD == 0:
            self._rebuild()

    def entered(self, key: Hashable) -> None:
        """A prefix is in the cache."""
        self._count(key, True)

    def left(self, key: Hashable) -> None:
        """A prefix is not in the cache any more."""
        self._count(key, False)

    def first(self, candidates: Mapping[Hashable, object], some: Sequence[Hashable]) -> Hashable:
        """The prefix to evict of those in the cache, which come least recently used first. It looks at the least
        recently used ones and at `some` others: one of these goes first only if its index is far lower, since indexes
        are estimates.
        """
        sample = [*islice(candidates, SAMPLE), *some]
        leaves = [key for key in sample if key not in self._lives or not self._lives[key].kept]
        oldest, best = (leaves or sample)[0], min(leaves or sample, key=self.index)
        return best if self.index(best) < _CLEAR * self.index(oldest) else oldest

    def index(self, key: Hashable) -> float:
        """The retention index."""
        life = self._lives.get(key)
        return 0.0 if life is None else self._table(life).index[_age(self._now - life.last)]

    def _table(self, life: _Life) -> _Table:
        kind: tuple[int, ...]
        if life.uses >= KNOWN:
            kind = (_age(life.interval),)
        else:
            before = self._lives.get(life.parent)
            kind = (life.uses, _age(before.uses) if before is not None else -1)
        return self._tables.setdefault(kind, _Table())

    def _count(self, key: Hashable, cached: bool) -> None:
        life = self._lives.get(key)
        if life is None or life.cached == cached:
            return
        life.cached = cached
        if (parent := self._lives.get(life.parent)) is not None:
            parent.kept += 1 if cached else -1

    def _rebuild(self) -> None:
        """Make the indexes anew, and let old uses count less."""
        waiting: dict[int, list[int]] = {}
        for life in self._lives.values():
            table = self._table(life)
            waiting.setdefault(id(table), [0] * _AGES)[_age(self._now - life.last)] += 1
        for table in self._tables.values():
            table.index = _indexes(table.uses, waiting.get(id(table), [0] * _AGES))
            table.uses = [0.98 * count for count in table.uses]


def _age(time: float) -> int:
    """Ages on a logarithmic scale, two for each doubling."""
    return min(int(2 * math.log2(max(time, 1))), _AGES - 1)


def _width(age: int) -> float:
    return float(2 ** ((age + 1) / 2) - 2 ** (age / 2))


def _indexes(uses: Sequence[float], waiting: Sequence[int]) -> list[float]:
    """Index of each age, of a class with these uses at each age and members that still wait."""
    reached, hazards = 0.0, [0.0] * _AGES
    for age in reversed(range(_AGES)):
        reached += uses[age] + waiting[age]
        # Half of those that wait at an age are at risk in it; a use more and one member more for what nobody saw yet.
        hazards[age] = (uses[age] + 0.02) / max(reached - waiting[age] / 2 + 1, 1)
    found = [0.0] * _AGES
    for age in range(_AGES):
        alive, used, time = 1.0, 0.0, 0.0
        for end in range(age, _AGES):
            hit = alive * min(hazards[end], 1)
            time += (alive - hit / 2) * _width(end)
            used, alive = used + hit, alive - hit
            found[age] = max(found[age], used / time)
            if alive < 1e-3:
                break
    return found


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
