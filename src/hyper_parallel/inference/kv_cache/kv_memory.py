"""KV cache in device memory and tiers: swapping of requests, groups of streamed contexts, prefixes that move down.

A page that a prompt fills is known by its key wherever it lies: `share` in `page_pool` finds it on the device, `find`
in a tier. What lies in a tier stays there when it is read, until its slot is needed, so that a page is written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hyper_parallel.inference.kv_cache.moves import Load, PageMover
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.report import CacheReport, TierReport
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, LayerShape, page_bytes
from hyper_parallel.inference.kv_cache.stream import Group, StreamReader
from hyper_parallel.inference.kv_cache.tiers import Block, KVTiers
from hyper_parallel.inference.running import Running, StoredPages
from hyper_parallel.offloading.tiers import Tier

T = TypeVar("T")
SHORT = 4 << 20
"""Bytes that are waited for: a read of so many takes about a millisecond."""


class KVMemory:
    """Pages of requests in tiers. The shapes of the cache's layers are known: it has been written to."""

    def __init__(
        self,
        cache: PagedCache,
        pool: PagePool,
        page: int,
        tiers: Mapping[str, Tier],
        shapes: Sequence[LayerShape],
        *,
        stored: int | None = None,
        ordered: bool = False,
    ) -> None:
        """`page`: tokens of a page, of which this process stores `stored`, by default all. `shapes`: those of the
        cache's layers, or larger ones, by which memory is divided. `ordered`: wait for each read at once, so that what
        is in a pass does not depend on how fast a tier is: ranks that run the same passes need that. Raises TierError
        if a tier has not enough memory."""
        self._ordered = ordered
        self._cache, self._pool, self._page = cache, pool, page
        self.sizes: KVCacheSizes = cache.sizes
        stored = page if stored is None else stored
        self.tiers = KVTiers(tiers, self.sizes, self.sizes.block * page_bytes(shapes, stored))
        device = next(layer.pages.stores[0].device for layer in cache.layers if layer.pages is not None)
        self._mover = PageMover(cache, self.tiers, stored, device)
        self._reader = StreamReader(cache.staging, self.tiers, [layer.pages for layer in cache.layers])
        self._stored: dict[bytes, tuple[Block, int, int]] = {}
        """Key to block, pages of the block, and place in it."""
        self._arriving: dict[Load, tuple[Running, list[tuple[bytes, int]]]] = {}
        self._coming: set[bytes] = set()
        plane = stored * max(max(one.planes) for one in shapes)
        most = self.sizes.device // 2 - 1 if self.sizes.group is None else self.sizes.group
        self.group = max(1, min(self.tiers.slot // plane, most))
        """Pages of a group of a streamed context."""
        self._planes = 2 * len(shapes)
        self.counts = Counter[str]()
        """Fields of `CacheReport`."""
        pool.evicted, pool.block = self._demote, self.sizes.block
        self.tiers.dropped = self._forget
        cache.attach(self._reader, self._mover.poll)

    def streams(self, one: Running) -> bool:
        """Whether the request is longer than the device's memory."""
        return one.longest > self.sizes.device

    def used(self, one: Running) -> None:
        """A request begins: its prefixes are used."""
        self.tiers.uses.used(one.keys)

    @property
    def least(self) -> int:
        """Pages on the device with which any request runs: a group and one more."""
        return self.group + 1

    def blocks_of(self, pages: int) -> int:
        """Slots that a streamed request of so many pages can need."""
        return -(-pages // self.group) * self._planes

    def begin(self) -> None:
        """A run begins: its tokens are counted from 0."""
        self.counts.clear()

    def swap_out(self, one: Running) -> bool:
        """Write the pages of a request to tiers. False, and nothing is changed, where no tier has room."""
        parts, fresh = [], []
        for place in range(one.used):
            found = self._stored.get(key) if (key := one.key(place)) is not None else None
            if found is None:
                fresh.append(place)
            else:
                self.tiers.pin(found[0])
                parts.append(StoredPages(found[0], found[1], [(found[2], place)]))
        for places in self._blocks(fresh):
            block = self._mover.store([one.pages[place] for place in places])
            if block is None:
                for part in parts:
                    self.tiers.unpin(part.block)
                return False
            self._enter(block, [one.key(place) for place in places])
            parts.append(StoredPages(block, len(places), list(enumerate(places))))
        one.stored = parts
        return True

    def swap_in(self, one: Running) -> None:
        """Begin to read the pages of a request; `one.pages` has room for them."""
        parts, one.stored = one.stored, []
        for part in parts:
            for _, place in part.places:
                if (key := one.key(place)) is not None and (page := self._pool.share(key)) is not None:
                    self._pool.release([one.pages[place]])
                    one.pages[place] = page
                    part.places = [(index, other) for index, other in part.places if other != place]
            if part.places:
                self._load(one, part)
            else:
                self.tiers.unpin(part.block)

    def holds(self, key: bytes) -> bool:
        """Whether a page of prompts lies in a tier."""
        return key in self._stored

    def coming(self, key: bytes | None) -> bool:
        """Whether a page of prompts is on its way to the device."""
        return key in self._coming

    def fetch(self, one: Running, place: int) -> bool:
        """Begin to read page `place` of a prompt if it lies in a tier; whether it does."""
        key = one.key(place)
        found = self._stored.get(key) if key is not None else None
        if key is None or found is None or place >= len(one.pages):
            return False
        self.tiers.pin(found[0])
        self._coming.add(key)
        self._load(one, StoredPages(found[0], found[1], [(found[2], place)]))
        self.counts["fetched"] += self._page
        return True

    def poll(self) -> None:
        """Take note of pages that have arrived."""
        self._mover.poll()
        for load in [load for load in self._arriving if load.over]:
            self._arrived(load)

    def finish_short(self) -> None:
        """Wait for what is on its way where that takes less time than a pass without it. Raises TierError."""
        if sum(load.block.size for load in self._arriving) <= SHORT:
            for load in list(self._arriving):
                self._mover.finish(load)
            self.poll()

    def finish(self, one: Running) -> None:
        """Wait for the pages of a request. Raises TierError."""
        for load in [load for load, (owner, _) in self._arriving.items() if owner is one]:
            self._mover.finish(load)
        self.poll()

    def push(self, one: Running) -> bool:
        """Write the oldest pages of a streamed request to tiers, layer by layer, and free them. False, and nothing is
        changed, where no tier has room."""
        pages = one.pages[: self.group]
        group = Group(one.base, one.base + self.group * self._page)
        for layer in self._cache.layers:
            for which, store in enumerate(layer.pages.stores if layer.pages is not None else ()):
                block = self._mover.store_plane(store, pages)
                if block is None:
                    self._free(group)
                    return False
                group.blocks[layer.layer, which] = block
        one.older.append(group)
        one.base = group.end
        one.pages = one.pages[self.group :]
        self._pool.release(pages)
        one.lay()
        self.counts["streamed"] += self.group * self._page
        return True

    def release(self, one: Running) -> None:
        """Give up all that a request has in tiers."""
        for part in one.stored:
            self.tiers.unpin(part.block)
        for group in one.older:
            self._free(group)
        one.stored, one.older = [], []

    def settle(self) -> None:
        """Wait until nothing is under way. Raises TierError."""
        self._mover.settle()
        self.poll()

    def forget(self) -> None:
        """Drop all prefixes: the weights have changed."""
        self.settle()
        self._pool.forget()
        self.tiers.forget()

    def report(self) -> CacheReport:
        """Figures so far."""
        tiers = tuple(
            TierReport(one.name, one.slots * self.tiers.slot, one.written, one.read)
            for one in self.tiers.levels
        )
        return CacheReport(tiers=tiers, **self.counts)

    def close(self) -> None:
        """Close the tiers, and give all memory back: tensors of the cache, too, which refers to this and would live
        until the next collection of garbage."""
        self.tiers.close()
        self._mover.clear()
        self._reader.clear()
        self._cache.clear()

    def _load(self, one: Running, part: StoredPages) -> None:
        targets = [(index, one.pages[place]) for index, place in part.places]
        keys = [(key, one.pages[place]) for _, place in part.places if (key := one.key(place)) is not None]
        one.arriving += len(targets)
        load = self._mover.load(part.block, part.count, targets)
        self._arriving[load] = (one, keys)
        if self._ordered:
            self._mover.finish(load)
            self._arrived(load)

    def _arrived(self, load: Load) -> None:
        one, keys = self._arriving.pop(load)
        one.arriving -= len(load.targets)
        for key, page in keys:
            self._pool.register(key, page)
            self._coming.discard(key)

    def _demote(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Pages without users leave the device."""
        fresh = []
        for key, page in pages:
            if (found := self._stored.get(key)) is not None:
                self.tiers.touch(found[0])
            else:
                fresh.append((key, page))
        for part in self._blocks(fresh):
            block = self._mover.store([page for _, page in part])
            if block is None:
                return
            self._enter(block, [key for key, _ in part])
            self.tiers.unpin(block)

    def _blocks(self, pages: Sequence[T]) -> list[Sequence[T]]:
        size = self.sizes.block
        return [pages[first : first + size] for first in range(0, len(pages), size)]

    def _enter(self, block: Block, keys: Sequence[bytes | None]) -> None:
        for index, key in enumerate(keys):
            if key is not None and key not in self._stored:
                block.keys.append(key)
                self.tiers.uses.entered(key)
                self._stored[key] = (block, len(keys), index)

    def _forget(self, block: Block) -> None:
        for key in block.keys:
            del self._stored[key]

    def _free(self, group: Group) -> None:
        for block in group.blocks.values():
            self.tiers.unpin(block)
        group.blocks.clear()
