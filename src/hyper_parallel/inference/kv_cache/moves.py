"""Moves of KV pages between the device and blocks of tiers, through two transfer buffers.

A page of all layers is scattered over the layers' stores, and a block is one piece: pages are packed into a buffer that
is written at once, and unpacked from one that was read. Layout of a block: layer by layer keys, then values, of each
all pages of the block. Loads are under way while passes run; `poll`, called often, ends what is over and begins the
next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.page_pool import runs_of
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.pages import rows_of
from hyper_parallel.inference.kv_cache.tiers import Block, KVTiers
from hyper_parallel.offloading.tiers import Pending


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
        block.level, block.slot = level, self._tiers.levels[level].free.pop()
        buffer.pending = self._tiers.begin_write(block, x)
