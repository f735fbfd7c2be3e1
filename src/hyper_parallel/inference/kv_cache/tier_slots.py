"""Slots of one memory tier for blocks of keys and values, and what was copied to and from them.

Both pagers of keys and values use it. The engine's reserves equal slots for all of its pages at once; a `TieredCache`
reserves some at a time while it grows, since a `host` of many GiB must not be pinned for a short text, and of several
sizes, since a block's bytes change with the rows of the batch. A slot does not move while it holds a block, unless the
tier is full and free slots have another size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import Pending, Tier, begin_reads
from hyper_parallel.units import round_up


@dataclass
class Moved:
    """Bytes and copies that one tier moved, and bytes that it holds now."""

    written: int = 0
    writes: int = 0
    read: int = 0
    reads: int = 0
    held: int = 0


class TierSlots:
    """One tier. Its copies run outside of PyTorch's dispatch modes: its memory is not the device's."""

    def __init__(self, name: str, tier: Tier) -> None:
        self.name, self.tier = name, tier
        self.moved = Moved()
        self.free: dict[int, list[int]] = defaultdict(list)
        """Bytes of a slot to the slots that hold nothing."""
        self._sizes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._next = self._end = 0

    def reserve(self, count: int, size: int) -> None:
        """Have `count` more slots of `size` bytes. Raises TierError, and changes nothing, if there is not enough."""
        step = round_up(size, self.tier.align)
        fresh = {self._next + place: self._end + place * step for place in range(count)}
        sizes, offsets = self._sizes | dict.fromkeys(fresh, size), self._offsets | fresh
        with outside_modes():
            self.tier.reserve(sizes, offsets)
        self._sizes, self._offsets = sizes, offsets
        self.free[size] += reversed(fresh)
        self._next, self._end = self._next + count, self._end + count * step

    def has_room(self, size: int) -> bool:
        """Whether a slot of `size` bytes is free, or was made so. Raises TierError where the machine, the disk or other
        users of a pool leave less than the tier's capacity."""
        return bool(self.free[size]) or self._grow(size) or self._repack(size)

    def take(self, size: int) -> int:
        """Take a free slot of `size` bytes; there must be one."""
        self.moved.held += size
        return self.free[size].pop()

    def give_back(self, slot: int) -> None:
        """The slot holds nothing any more."""
        size = self._sizes[slot]
        self.moved.held -= size
        self.free[size].append(slot)

    def begin_write(self, slot: int, x: Tensor) -> Pending:
        """Begin to write uint8 [n] to a slot."""
        self.moved.written += x.numel()
        self.moved.writes += 1
        with outside_modes():
            return self.tier.begin_write(slot, x)

    def begin_read(self, slots: Sequence[int], x: Tensor) -> Pending:
        """Begin to read slots, one after the other, to uint8 [slots · n]."""
        self.moved.read += x.numel()
        self.moved.reads += 1
        with outside_modes():
            if len(slots) == 1:
                return self.tier.begin_read(slots[0], x.view(-1))
            return begin_reads(self.tier, slots, x.view(len(slots), -1))

    def _grow(self, size: int) -> bool:
        """Reserve more slots, a quarter of what there is, as far as there is room; whether there are any."""
        step = round_up(size, self.tier.align)
        room = (self.tier.capacity - self._end) // step
        for count in sorted({min(room, max(4, self._end // 4 // step)), min(room, 1)}, reverse=True):
            if count == 0:
                break
            try:
                self.reserve(count, size)
            except TierError:
                if count == 1:
                    raise
                continue
            return True
        return False

    def _repack(self, size: int) -> bool:
        """Give up free slots of other sizes, move the rest together, and reserve slots in their place."""
        free = {slot for slots in self.free.values() for slot in slots}
        if not free:
            return False
        sizes = {slot: count for slot, count in self._sizes.items() if slot not in free}
        offsets, end = dict[int, int](), 0
        for slot in sorted(sizes, key=self._offsets.__getitem__):
            offsets[slot] = end
            end += round_up(sizes[slot], self.tier.align)
        with outside_modes():
            self.tier.reserve(sizes, offsets)
        self._sizes, self._offsets, self._end = sizes, offsets, end
        self.free.clear()
        return self._grow(size)
