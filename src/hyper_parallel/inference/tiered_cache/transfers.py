"""Transfers of a tiered KV cache: blocks in slots of tiers, written there, and read ahead of their use within a window.

`window` bounds the bytes of device memory whose copies are under way. A read begins as soon as there is room, in the
order in which blocks are needed: those of a layer while it is put together, then those of the next streamed layer,
while this one computes. Blocks that follow one another are read together, up to half of the window and `GROUP` bytes,
so that one group is put in its place while the next one comes. Buffers of groups that were read serve the next ones, as
long as the window has room for both.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.compat.memory import StorageReference
from hyper_parallel.errors import BudgetError, TierError
from hyper_parallel.inference.kv_cache.tier_slots import TierSlots
from hyper_parallel.offloading.tiers import Pending, Tier
from hyper_parallel.units import format_bytes


@dataclass(frozen=True)
class Place:
    """Where a block lies."""

    tier: TierSlots
    slot: int
    bytes: int

    def free(self) -> None:
        """The block is not needed any more."""
        self.tier.give_back(self.slot)


class TierBlocks:
    """Blocks of bytes in `tiers`, by name, the fastest first. Closed at the latest when it is collected."""

    def __init__(self, tiers: Mapping[str, Tier]) -> None:
        self.tiers = [TierSlots(name, tier) for name, tier in tiers.items()]
        self._end = weakref.finalize(self, _close, list(tiers.values()))

    def close(self) -> None:
        """Give all memory and files back. Calls after the first do nothing."""
        self._end()

    def write(self, x: Tensor) -> tuple[Place, Pending]:
        """Begin to copy uint8 [n] to the first tier with room. Raises TierError where none has."""
        tier = self._with_room(x.numel())
        slot = tier.take(x.numel())
        return Place(tier, slot, x.numel()), tier.begin_write(slot, x)

    def _with_room(self, size: int) -> TierSlots:
        failure: TierError | None = None
        for tier in self.tiers:
            try:
                if tier.has_room(size):
                    return tier
            except TierError as error:  # the next tier may have room
                failure = error
        if failure is not None:
            raise failure
        if not self.tiers:
            raise TierError(
                "keys and values that do not fit into device have no tier to go to; set host or pool to a number of "
                "bytes, or flash to a folder"
            )
        full = ", ".join(
            f"{one.name} holds {format_bytes(one.moved.held)} of {format_bytes(one.tier.capacity)}"
            for one in self.tiers
        )
        raise TierError(
            f"the tiers of the cache are full ({full}); raise host or pool, or set flash to a folder on a larger disk"
        )


def _close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()


GROUP = 2**22
"""Bytes that are read together, at most, but for one block."""


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
    blocks: Sequence[Block]
    """None of a write."""
    buffer: Tensor
    """uint8 [n]."""
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
        """Count bytes that are held from now on, or given back."""
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
        """Count bytes that are held for a moment."""
        self.peak = max(self.peak, self.held + more)

    # Writing.

    def write(self, buffer: Tensor) -> Place:
        """Begin to write a whole buffer, which is the window's from now on."""
        self._make_room(buffer.numel())
        place, pending = self.blocks.write(buffer)
        self._writes.append(_Copy((), buffer, pending))
        self._count(buffer.numel())
        return place

    # Reading.

    def read(
        self,
        wanted: Sequence[Block],
        device: torch.device,
        use: Callable[[Sequence[Block], Tensor], None],
    ) -> None:
        """Call `use` with blocks that follow one another and their bytes [blocks, n], which are let go of afterwards,
        until it has had all that are wanted."""
        if any(mine is not one for mine, one in zip(self._coming(), (*wanted, None), strict=False)):
            self.cancel()
        done = 0
        begun = len(self._coming())
        while done < len(wanted):
            if not self._reads:
                self._make_room(wanted[done].place.bytes)
            begun += self._begin(wanted[begun:], device)
            done += self._use(self._reads.popleft(), use)

    def _coming(self) -> list[Block]:
        """Blocks whose reads have begun."""
        return [block for copy in self._reads for block in copy.blocks]

    def _use(self, copy: _Copy, use: Callable[[Sequence[Block], Tensor], None]) -> int:
        """How many blocks these are."""
        copy.pending.wait()
        use(copy.blocks, copy.buffer.view(len(copy.blocks), -1))
        self._count(-copy.buffer.numel())
        if self._under_way + self._idle_bytes + copy.buffer.numel() <= self.window:
            self._idle.append(copy.buffer)
            self.hold(copy.buffer.numel())
        return len(copy.blocks)

    def ahead(self, blocks: Sequence[Block], device: torch.device) -> None:
        """Begin to read what is needed next."""
        self._settle_written()
        self._begin(blocks[len(self._coming()) :], device)

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
        """Begin to read the first of them, as many as there is room for; how many that are."""
        begun = 0
        while begun < len(blocks):
            group = self._group(blocks[begun:])
            size = sum(block.place.bytes for block in group)
            if self._under_way + size > self.window:
                break
            buffer = self._buffer(size, device)
            pending = group[0].place.tier.begin_read([block.place.slot for block in group], buffer)
            self._reads.append(_Copy(group, buffer, pending))
            self._count(size)
            begun += len(group)
        return begun

    def _group(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The first ones that are read together: of one tier, size and batch; at least one."""
        first = blocks[0]
        most = min(GROUP, self.window // 2, self.window - self._under_way) // first.place.bytes

        def alike(one: Block) -> bool:
            return (one.place.tier.name, one.place.bytes, one.count, one.epoch) == (
                first.place.tier.name,
                first.place.bytes,
                first.count,
                first.epoch,
            )

        return list(itertools.takewhile(alike, blocks[: max(most, 1)]))

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        """A buffer of `size` bytes, for which the window has room beside what is under way."""
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
        """Let idle buffers go, but for `most` bytes."""
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
