"""KV cache in device memory and tiers: swapping of requests, groups of streamed contexts, prefixes that move down.

A page that a prompt fills is known by its key wherever it lies: `share` in `page_pool` finds it on the device, `find`
in a tier. What lies in a tier stays there when it is read, until its slot is needed, so that a page is written once.
`PageMover` transfers pages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.pages import StreamReader
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, LayerShape, page_bytes
from hyper_parallel.inference.kv_cache.tiers import Block, CacheReport, Group, KVTiers, TierReport
from hyper_parallel.inference.request import Running, StoredPages
from hyper_parallel.inference.run_allocator import rows_of, runs_of
from hyper_parallel.offloading.tiers import Pending, Tier

T = TypeVar("T")
SHORT = 4 << 20
"""Bytes that are waited for: their read takes about a millisecond."""


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
        """`page`: tokens of a page; `stored`: those that this process stores, by default all. `shapes`: those of the
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

    @property
    def least(self) -> int:
        """Pages on the device with which any request runs: a group and one more."""
        return self.group + 1

    def blocks_of(self, pages: int) -> int:
        """Slots that a streamed request of this number of pages can need."""
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
            TierReport(one.name, count * self.tiers.slot, one.moved.written, one.moved.read)
            for one, count in zip(self.tiers.levels, self.tiers.counts, strict=True)
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
                self._stored[key] = (block, len(keys), index)

    def _forget(self, block: Block) -> None:
        for key in block.keys:
            del self._stored[key]

    def _free(self, group: Group) -> None:
        for block in group.blocks.values():
            self.tiers.unpin(block)
        group.blocks.clear()


# Moves of KV pages between the device and blocks of tiers, through two transfer buffers.
#
# A page of all layers is scattered over the layers' stores, and a block is one piece: pages are packed into a buffer
# that is written at once, and unpacked from one that was read. Layout of a block: layer by layer keys, then values, of
# each all pages of the block. Loads are under way while passes run; `poll`, called often, ends what is over and begins
# the next.


@dataclass(eq=False)
class Load:
    """Pages on their way to the device: of a block with `count` pages, page `index` to each `page`."""

    block: Block
    count: int
    targets: list[tuple[int, int]]
    over: bool = False


@dataclass(eq=False)
class _Buffer:
    bytes: Tensor
    pending: Pending | None = None
    load: Load | None = None


class PageMover:
    """Packs, writes, reads and unpacks pages of one cache."""

    def __init__(self, cache: PagedCache, tiers: KVTiers, page: int, device: torch.device) -> None:
        self._cache, self._tiers, self._page = cache, tiers, page
        size = tiers.slot if tiers.levels else 0
        self._buffers = [_Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2)]
        self._turn = 0
        self._loads: deque[Load] = deque()
        tiers.move = self._move

    def store(self, pages: Sequence[int]) -> Block | None:
        """Begin to write pages of all layers to one block; None where no tier has room. The pages may be overwritten
        as soon as it returns."""
        parts = [(store, len(pages) * self._page) for store in self._stores()]
        count = sum(rows * store[0].nbytes for store, rows in parts)
        return self._write(parts, pages, count)

    def store_plane(self, store: Tensor, pages: Sequence[int]) -> Block | None:
        """As `store`, of one layer the keys or values only, which lie in `store`."""
        rows = len(pages) * self._page
        return self._write([(store, rows)], pages, rows * store[0].nbytes)

    def load(self, block: Block, count: int, targets: list[tuple[int, int]]) -> Load:
        """Begin to read pages of a pinned block; it is unpinned when they are on the device."""
        found = Load(block, count, targets)
        self._loads.append(found)
        self.poll()
        return found

    def poll(self) -> None:
        """End loads that are over, and begin others, without waiting."""
        for buffer in self._buffers:
            if buffer.load is not None and buffer.pending is not None and buffer.pending.done():
                self._settle(buffer)
            if self._loads and (buffer.pending is None or (buffer.load is None and buffer.pending.done())):
                self._settle(buffer)
                self._begin(buffer)

    def finish(self, load: Load) -> None:
        """Wait until a load is over. Raises TierError."""
        while not load.over:
            buffer = self._next()
            if not load.over and self._loads:
                self._begin(buffer)

    def settle(self) -> None:
        """Wait until nothing is under way. Raises TierError."""
        while self._loads:
            self.finish(self._loads[-1])
        for buffer in self._buffers:
            self._settle(buffer)

    def clear(self) -> None:
        """Give up all buffers. Nothing is under way."""
        self._loads.clear()
        self._buffers = []

    def _stores(self) -> Iterator[Tensor]:
        for layer in self._cache.layers:
            if layer.pages is not None:
                yield from layer.pages.stores

    def _next(self) -> _Buffer:
        """The buffer that has been in use for longest, free now."""
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        self._settle(buffer)
        return buffer

    def _settle(self, buffer: _Buffer) -> None:
        pending, load = buffer.pending, buffer.load
        buffer.pending = buffer.load = None
        if pending is not None:
            pending.wait()
        if load is not None:
            self._unpack(load, buffer.bytes)
            load.over = True
            self._tiers.unpin(load.block)

    def _begin(self, buffer: _Buffer) -> None:
        buffer.load = load = self._loads.popleft()
        buffer.pending = self._tiers.begin_read(load.block, buffer.bytes[: load.block.size])

    def _write(self, parts: Sequence[tuple[Tensor, int]], pages: Sequence[int], count: int) -> Block | None:
        block = self._tiers.place(count)
        if block is None:
            return None
        buffer = self._next()
        rows = rows_of(runs_of(pages), self._page, 0, len(pages) * self._page)
        end = 0
        for store, tokens in parts:
            first, end = end, end + tokens * store[0].nbytes
            part = buffer.bytes[first:end].view(store.dtype).view(tokens, *store.shape[1:])
            torch.cat([store[one] for one in rows], out=part)
        buffer.pending = self._tiers.begin_write(block, buffer.bytes[:count])
        return block

    def _unpack(self, load: Load, bytes_: Tensor) -> None:
        page, end = self._page, 0
        for store in self._stores():
            first, end = end, end + load.count * page * store[0].nbytes
            part = bytes_[first:end].view(store.dtype).view(load.count * page, *store.shape[1:])
            for index, target in load.targets:
                store[target * page : (target + 1) * page] = part[index * page : (index + 1) * page]

    def _move(self, block: Block, level: int) -> None:
        """Copy an idle block to a free slot of another level."""
        buffer = self._next()
        x = buffer.bytes[: block.size]
        self._tiers.begin_read(block, x).wait()
        block.level, block.slot = level, self._tiers.levels[level].take(self._tiers.slot)
        buffer.pending = self._tiers.begin_write(block, x)
