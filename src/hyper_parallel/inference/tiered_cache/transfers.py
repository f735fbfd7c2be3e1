"""Transfers of a tiered KV cache: blocks that are written to tiers, and read ahead of their use, within a window.

`window` bounds the bytes of device memory whose copies are under way. A read begins as soon as there is room, in the
order in which blocks are needed: those of a layer while it is put together, then those of the next streamed layer,
while this one computes. Buffers of blocks that were read serve the next ones, as long as the window has room for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.compat.live_storages import StorageReference
from hyper_parallel.errors import BudgetError
from hyper_parallel.inference.tiered_cache.blocks import Place, TierBlocks
from hyper_parallel.offloading.tiers import Pending
from hyper_parallel.units import format_bytes


@dataclass(eq=False)
class Block:
    """Keys and values of `count` tokens of one layer, from `first` on, for the rows of the batch as they were in
    `epoch`."""

    place: Place
    first: int
    count: int
    rows: int
    epoch: int

    @property
    def end(self) -> int:
        """The token behind it."""
        return self.first + self.count


@dataclass(eq=False)
class _Copy:
    block: Block | None
    """None for a write."""
    buffer: Tensor
    pending: Pending


class Transfers:
    """Blocks under way, and an account of the device memory that the cache holds."""

    def __init__(self, blocks: TierBlocks) -> None:
        self.blocks = blocks
        self.window = 0
        """Bytes that may be under way."""
        self.budget: int | None = None
        self.held = 0
        """Bytes of the layers, and of what is under way."""
        self.peak = 0
        self._reads: deque[_Copy] = deque()
        self._writes: deque[_Copy] = deque()
        self._under_way = 0
        self._idle: list[Tensor] = []
        """Buffers that are held for blocks to come."""
        self._given: list[StorageReference] = []

    # Accounts.

    def hold(self, count: int) -> None:
        """So many bytes more, or fewer, are held."""
        self.held += count

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Attention is given these, which the cache does not keep.

        Raises BudgetError if the model still has those of other layers, and all together exceed the budget.
        """
        self._given = [one for one in self._given if one.alive()]
        before = sum(one.bytes for one in self._given)
        now = [StorageReference(one) for one in tensors]
        self._given += now
        total = self.held + before + sum(one.bytes for one in now)
        self.peak = max(self.peak, total)
        if self.budget is not None and total > self.budget and before:
            raise BudgetError(
                f"the model keeps {format_bytes(before)} of keys and values after the layer that read them, and with "
                f"these the cache needs {total} bytes; set device to at least {total}",
                floor=total,
            )

    def peaked(self, more: int) -> None:
        """So many bytes are held for a moment."""
        self.peak = max(self.peak, self.held + more)

    # Writing.

    def write(self, buffer: Tensor) -> Place:
        """Begin to write a whole buffer, which is the window's from now on."""
        self._make_room(buffer.numel())
        place, pending = self.blocks.write(buffer)
        self._writes.append(_Copy(None, buffer, pending))
        self._count(buffer.numel())
        return place

    # Reading.

    def read(
        self, wanted: Sequence[Block], device: torch.device, use: Callable[[Block, Tensor], None]
    ) -> None:
        """Call `use` with each block and its bytes, which are let go of afterwards."""
        if len(self._reads) > len(wanted) or any(
            copy.block is not block for copy, block in zip(self._reads, wanted, strict=False)
        ):
            self.cancel()
        begun = len(self._reads)
        for block in wanted:
            if not self._reads:
                self._make_room(block.place.bytes)
            begun += self._begin(wanted[begun:], device)
            self._use(self._reads.popleft(), use)

    def _use(self, copy: _Copy, use: Callable[[Block, Tensor], None]) -> None:
        copy.pending.wait()
        assert copy.block is not None, "a read"
        use(copy.block, copy.buffer)
        self._count(-copy.buffer.numel())
        if self._under_way + self._idle_bytes + copy.buffer.numel() <= self.window:
            self._idle.append(copy.buffer)
            self.hold(copy.buffer.numel())

    def ahead(self, blocks: Sequence[Block], device: torch.device) -> None:
        """Begin to read what is needed next."""
        self._settle_written()
        self._begin(blocks[len(self._reads) :], device)

    def cancel(self) -> None:
        """Drop what was read ahead, and buffers: what comes next may need the memory."""
        while self._reads:
            self._drop(self._reads.pop())
        self._let_go(0)

    def finish(self) -> None:
        """Wait for everything under way."""
        self.cancel()
        while self._writes:
            self._drop(self._writes.popleft())

    def shrink(self, window: int) -> None:
        """Have another window; what does not fit into a smaller one is dropped, or waited for."""
        self.window = window
        if self._under_way > window:
            self._make_room(0)
        self._let_go(max(window - self._under_way, 0))

    def _begin(self, blocks: Sequence[Block], device: torch.device) -> int:
        for count, block in enumerate(blocks):
            size = block.place.bytes
            if self._under_way + size > self.window:
                return count
            buffer = self._buffer(size, device)
            self._reads.append(_Copy(block, buffer, self.blocks.read(block.place, buffer)))
            self._count(size)
        return len(blocks)

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        """Of `size` bytes, for which the window has room beside what is under way."""
        place = next((place for place, one in enumerate(self._idle) if one.numel() == size), None)
        if place is not None:
            self.hold(-size)
            return self._idle.pop(place)
        self._let_go(self.window - self._under_way - size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def _idle_bytes(self) -> int:
        return sum(one.numel() for one in self._idle)

    def _let_go(self, most: int) -> None:
        """Of idle buffers, but for `most` bytes."""
        while self._idle and self._idle_bytes > most:
            self.hold(-self._idle.pop().numel())

    def _make_room(self, count: int) -> None:
        self._settle_written()
        self._let_go(max(self.window - self._under_way - count, 0))
        while self._under_way + count > self.window and self._writes:
            self._drop(self._writes.popleft())
        while self._under_way + count > self.window and self._reads:
            self._drop(self._reads.pop())

    def _settle_written(self) -> None:
        while self._writes and self._writes[0].pending.done():
            self._drop(self._writes.popleft())

    def _drop(self, copy: _Copy) -> None:
        copy.pending.wait()
        self._count(-copy.buffer.numel())

    def _count(self, count: int) -> None:
        self._under_way += count
        self.hold(count)
