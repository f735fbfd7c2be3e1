"""Blocks of a KV cache in memory tiers: slots that are reserved as the cache grows, the fastest tier with room first.

A tier takes memory for a set of slots at once, so slots are reserved some at a time and used again by blocks of the
same size. A slot does not move while it holds a block, unless the tier is full and free slots have another size.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import Pending, Tier, begin_reads
from hyper_parallel.units import format_bytes


@dataclass(frozen=True)
class Place:
    """Where a block lies."""

    tier: str
    slot: int
    bytes: int


@dataclass
class Moved:
    """What one tier moved, in bytes and copies, and what it holds now."""

    written: int = 0
    writes: int = 0
    read: int = 0
    reads: int = 0
    held: int = 0


@dataclass
class _Slots:
    tier: Tier
    sizes: dict[int, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    free: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Bytes of a slot to the slots that hold nothing."""
    next: int = 0
    end: int = 0


class TierBlocks:
    """Blocks of bytes in `tiers`, by name, the fastest first. Closed at the latest when it is collected."""

    def __init__(self, tiers: Mapping[str, Tier]) -> None:
        self.moved = {name: Moved() for name in tiers}
        self._slots = {name: _Slots(tier) for name, tier in tiers.items()}
        self._end = weakref.finalize(self, _close, list(tiers.values()))

    def close(self) -> None:
        """Give all memory and files back. Calls after the first do nothing."""
        self._end()

    def write(self, x: Tensor) -> tuple[Place, Pending]:
        """Begin to copy uint8 [n] to the first tier with room. Raises TierError where none has."""
        name, slot = self._take(x.numel())
        moved = self.moved[name]
        moved.written, moved.writes = moved.written + x.numel(), moved.writes + 1
        moved.held += x.numel()
        return Place(name, slot, x.numel()), self._slots[name].tier.begin_write(slot, x)

    def read(self, places: Sequence[Place], x: Tensor) -> Pending:
        """Begin to copy blocks of one tier and size to uint8 [blocks, n]."""
        tier = places[0].tier
        moved = self.moved[tier]
        moved.read, moved.reads = moved.read + x.numel(), moved.reads + 1
        return begin_reads(self._slots[tier].tier, [place.slot for place in places], x)

    def free(self, place: Place) -> None:
        """The block is not needed any more."""
        self.moved[place.tier].held -= place.bytes
        self._slots[place.tier].free[place.bytes].append(place.slot)

    def _take(self, size: int) -> tuple[str, int]:
        failure: TierError | None = None
        for name, slots in self._slots.items():
            try:
                if not slots.free[size] and not _grow(slots, size) and not _packed(slots, size):
                    continue
            except (
                TierError
            ) as error:  # the machine, the disk, or other users of the pool leave less than was set
                failure = error
                continue
            return name, slots.free[size].pop()
        if failure is not None:
            raise failure
        if not self._slots:
            raise TierError(
                "keys and values that do not fit into device have no tier to go to; set host or pool to a number of "
                "bytes, or flash to a folder"
            )
        full = ", ".join(
            f"{name} holds {format_bytes(self.moved[name].held)} of {format_bytes(slots.tier.capacity)}"
            for name, slots in self._slots.items()
        )
        raise TierError(
            f"the tiers of the cache are full ({full}); raise host or pool, or set flash to a folder on a larger disk"
        )


def _grow(slots: _Slots, size: int) -> bool:
    """Reserve more slots of this size, a quarter of what there is, as far as there is room; whether there are any."""
    step = -(-size // slots.tier.align) * slots.tier.align
    room = (slots.tier.capacity - slots.end) // step
    for count in sorted({min(room, max(4, slots.end // 4 // step)), min(room, 1)}, reverse=True):
        if count == 0:
            return False
        fresh = {slots.next + i: slots.end + i * step for i in range(count)}
        try:
            slots.tier.reserve(slots.sizes | dict.fromkeys(fresh, size), slots.offsets | fresh)
        except TierError:
            if count == 1:
                raise
            continue
        slots.sizes |= dict.fromkeys(fresh, size)
        slots.offsets |= fresh
        slots.free[size] += reversed(fresh)
        slots.next, slots.end = slots.next + count, slots.end + count * step
        break
    return True


def _packed(slots: _Slots, size: int) -> bool:
    """Give up free slots of other sizes, move the rest together, and reserve slots of this size in their place."""
    free = {slot for found in slots.free.values() for slot in found}
    if not free:
        return False
    sizes = {slot: count for slot, count in slots.sizes.items() if slot not in free}
    offsets, end = dict[int, int](), 0
    for slot in sorted(sizes, key=slots.offsets.__getitem__):
        offsets[slot] = end
        end += -(-sizes[slot] // slots.tier.align) * slots.tier.align
    slots.tier.reserve(sizes, offsets)
    slots.sizes, slots.offsets, slots.end = sizes, offsets, end
    slots.free.clear()
    return _grow(slots, size)


def _close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()
