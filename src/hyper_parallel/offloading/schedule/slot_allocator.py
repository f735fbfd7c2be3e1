"""Slot allocator: places the slots of several plans in one tier.

Steps of different shapes have plans of their own, and one runs at a time. So of what a tier holds

    size = Σ slots that rest there between steps, of all plans + max over plans of what lives within one step only

A storage that lives on, a parameter or a moment, has one slot in a tier, which all plans share: going over to another
plan copies only what that one wants elsewhere. Slots that rest keep their places while a plan needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel.graph import Slot, StepGraph
from hyper_parallel.offloading.schedule.idle_intervals import Ints, LiveProfile

ALIGN = 4096
"""Bytes on whose multiples slots begin, so that files can be read past the system's cache."""


@dataclass(frozen=True)
class Places:
    """Where slots lie in a tier."""

    sizes: Mapping[int, int] = field(default_factory=dict)
    offsets: Mapping[int, int] = field(default_factory=dict)
    """Slot to its first byte; slots that are never needed at the same time may share memory."""
    size: int = 0

    @classmethod
    def within(cls, slots: Mapping[int, Slot]) -> Places:
        """Of the slots of one step, each taken only while it is needed."""
        packed = pack([(slot.first, slot.last, slot.bytes) for slot in slots.values()], align=ALIGN)
        sizes = {number: slot.bytes for number, slot in slots.items()}
        return cls(sizes, dict(zip(slots, packed.offsets, strict=True)), packed.size)


@dataclass(frozen=True)
class Shelf:
    """The slots of all plans of a run in one tier."""

    tier: str
    rest: Places = field(default_factory=Places)
    """What some plan relies on between steps. None overlaps another."""
    plans: Mapping[int, tuple[frozenset[int], Places]] = field(default_factory=dict)
    """Plan to its slots in `rest`, and to the places, from 0, of those that live within a step."""

    @property
    def size(self) -> int:
        """Bytes of the tier that are needed."""
        return self.rest.size + max((within.size for _, within in self.plans.values()), default=0)

    def holding(self, plan: int, step: StepGraph) -> Shelf:
        """With the slots of one more plan, whose step names slots that are here by their numbers."""
        slots = {number: slot for number, slot in sorted(step.slots.items()) if slot.tier == self.tier}
        resting = {number: slot.bytes for number, slot in slots.items() if slot.rest != "step"}
        known = self.rest.sizes
        assert all(known[number] == count for number, count in resting.items() if number in known)
        rest = _joined(self.rest, {number: count for number, count in resting.items() if number not in known})
        # A slot that rests for another plan is there already, also where this one needs it within a step only.
        inner = {number: slot for number, slot in slots.items() if number not in rest.sizes}
        used = frozenset(slots.keys() & rest.sizes.keys())
        return replace(self, rest=rest, plans={**self.plans, plan: (used, Places.within(inner))})

    def without(self, plan: int) -> Shelf:
        """Without the slots that only this plan needed."""
        plans = {number: slots for number, slots in self.plans.items() if number != plan}
        needed = frozenset[int]().union(*(used for used, _ in plans.values()))
        return replace(self, rest=_only(self.rest, needed), plans=plans)

    @property
    def places(self) -> Places:
        """Places of all slots in the tier."""
        sizes, offsets = dict(self.rest.sizes), dict(self.rest.offsets)
        for _, within in self.plans.values():
            sizes.update(within.sizes)
            offsets.update({number: self.rest.size + at for number, at in within.offsets.items()})
        return Places(sizes, offsets, self.size)


@dataclass(frozen=True)
class SlotAllocator:
    """Allocator of the slots of all tiers."""

    tiers: Mapping[str, Shelf]
    next: int = 0
    """The number of the next slot that is new."""
    known: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(name, tier) of a state input to its slot."""

    @classmethod
    def of(cls, tiers: Iterable[str]) -> SlotAllocator:
        """Empty ones."""
        return cls({name: Shelf(name) for name in tiers})

    def numbers(self, step: StepGraph) -> dict[tuple[int, str], int]:
        """(storage, tier) of the step's state to the slots that it has here already."""
        storages = {entry.name: storage for storage, entry in step.outside.items()}
        found = {}
        for (name, tier), number in self.known.items():
            storage = storages.get(name)
            # Of another size it is another shape of state, which nobody has seen yet.
            if storage is not None and step.storages[storage].bytes == self.tiers[tier].rest.sizes[number]:
                found[storage, tier] = number
        return found

    def holding(self, plan: int, step: StepGraph) -> SlotAllocator:
        """With the slots of one more plan, numbered from `numbers` and `next`."""
        tiers = {name: shelf.holding(plan, step) for name, shelf in self.tiers.items()}
        outside = step.outside
        resting = {
            (outside[slot.storage].name, slot.tier): number
            for number, slot in step.slots.items()
            if slot.rest != "step"
        }
        return SlotAllocator(
            tiers, max([self.next, *(number + 1 for number in step.slots)]), {**self.known, **resting}
        )

    def without(self, plan: int) -> SlotAllocator:
        """Without the slots that only this plan needed."""
        tiers = {name: shelf.without(plan) for name, shelf in self.tiers.items()}
        known = {
            (name, tier): number
            for (name, tier), number in self.known.items()
            if number in tiers[tier].rest.sizes
        }
        return SlotAllocator(tiers, self.next, known)


def _joined(rest: Places, slots: Mapping[int, int]) -> Places:
    """With slots beside those that are there: in the first hole that is large enough, else behind them."""
    sizes, offsets, end = dict(rest.sizes), dict(rest.offsets), rest.size
    holes = list(_holes(rest))
    for number, count in slots.items():
        sizes[number], taken = count, -(-count // ALIGN) * ALIGN
        index = next((i for i, (first, last) in enumerate(holes) if last - first >= taken), None)
        if index is None:
            offsets[number], end = end, end + taken
        else:
            first, last = holes[index]
            offsets[number], holes[index] = first, (first + taken, last)
    return Places(sizes, offsets, end)


def _only(rest: Places, needed: Collection[int]) -> Places:
    sizes = {number: count for number, count in rest.sizes.items() if number in needed}
    offsets = {number: rest.offsets[number] for number in sizes}
    end = max((offsets[number] + count for number, count in sizes.items()), default=0)
    return Places(sizes, offsets, -(-end // ALIGN) * ALIGN)


def _holes(rest: Places) -> Iterable[tuple[int, int]]:
    end = 0
    for number in sorted(rest.offsets, key=rest.offsets.__getitem__):
        if rest.offsets[number] > end:
            yield end, rest.offsets[number]
        end = rest.offsets[number] + -(-rest.sizes[number] // ALIGN) * ALIGN


# Arena offsets (dynamic storage allocation): storages that are live together never overlap.
#
#     size ≥ peak = max over k of Σ bytes of the lives that hold k, each rounded up to `align`
#
# Finding the least size is NP-hard (dynamic storage allocation). All lives are known beforehand, so that they need not
# be placed in the order in which they begin. Each is put as low as it fits over the whole of its life (`_place`), a
# greedy like that of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (arXiv 2001.03288),
# in several orders: the longest first, which stacks what is nested as forward and backward are; the largest first; by
# bytes × length. After each, what sticks out above the peak is moved to the front of the order and all is placed again,
# until nothing sticks out or the rounds are over. Rounds are counted and not timed: the same lives have the same
# offsets everywhere.

EFFORT = 40_000
"""Lives that are placed in all rounds together; there are at least 4 rounds and at most 64."""


@dataclass(frozen=True)
class Packed:
    """Where lives lie in an arena."""

    offsets: tuple[int, ...]
    """Bytes, in the order of the lives; multiples of the alignment."""
    size: int
    peak: int
    """Bytes alive at the worst moment, each life rounded up: no arena is smaller."""


def pack(lives: Sequence[tuple[int, int, int]], align: int = 512) -> Packed:
    """Offsets of lives (first, last, bytes), both places inclusive.

    A life whose first place lies behind its last one goes on in the next round: it is alive from `first` to the end and
    from the beginning to `last`. Lives without bytes lie at 0.

    Raises ValueError for a negative number of bytes or place, or an alignment that is not positive.
    """
    if align < 1:
        raise ValueError(f"an alignment of {align} bytes; it must be at least 1")
    table = np.asarray(lives, dtype=np.int64).reshape(len(lives), 3)
    if table.size and table.min() < 0:
        raise ValueError("a life has a negative place or number of bytes")
    first, last, sizes = table.T
    sizes = (sizes + align - 1) // align * align
    offsets = np.zeros(len(lives), dtype=np.int64)
    some = np.flatnonzero(sizes)
    if not some.size:
        return Packed(tuple(offsets.tolist()), 0, 0)
    arena = _Arena(first[some], last[some], sizes[some])
    offsets[some], size = arena.search()
    return Packed(tuple(offsets.tolist()), size, arena.peak)


class _Arena:
    """Lives that are to be placed. One that goes around the end has two stretches; the others' second one is empty."""

    def __init__(self, first: Ints, last: Ints, sizes: Ints) -> None:
        end = int(max(first.max(), last.max())) + 1
        around = first > last
        self.sizes = sizes
        self.first, self.last = first, np.where(around, end - 1, last)
        self.again = np.where(around, last, -1)
        """Last place of the stretch from 0 on."""
        live = LiveProfile(np.zeros(end, dtype=np.int64)).with_all(
            first, np.where(around, end + last, last) + 1, sizes
        )
        self.peak = live.peak
        self.length = self.last - self.first + 1 + self.again + 1

    def search(self) -> tuple[Ints, int]:
        """The smallest arena found."""
        number = np.arange(self.sizes.size)
        long, large = (np.frexp(of)[1] for of in (self.length, self.sizes))  # to a power of two
        orders = (
            np.lexsort((number, -self.length, -self.sizes, -long)),
            np.lexsort((number, -self.sizes, -self.length, -large)),
            np.lexsort((number, -self.sizes * self.length)),
        )
        rounds = min(64, max(4, EFFORT // self.sizes.size))
        offsets, size = number, 0
        for order, share in zip(orders, (rounds // 2, rounds // 4, rounds // 4), strict=True):
            now = order
            for _ in range(share):
                at = self._place(now)
                found = int((at + self.sizes).max())
                if not size or found < size:
                    size, offsets = found, at
                if size == self.peak:
                    return offsets, size
                sticks_out = (at + self.sizes > self.peak)[now]
                now = np.concatenate([now[sticks_out], now[~sticks_out]])
        return offsets, size

    def _place(self, order: Ints) -> Ints:
        """Each in turn into the lowest hole that it fits."""
        count = order.size
        offsets = np.zeros(count, dtype=np.int64)
        # What is placed, by ascending offset: first, last, again, offset, end.
        placed = np.empty((5, count), dtype=np.int64)
        for filled, one in enumerate(order):
            first, last, again, size = self.first[one], self.last[one], self.again[one], self.sizes[one]
            firsts, lasts, agains, begins, ends = placed[:, :filled]
            meets = (firsts <= last) & (lasts >= first) | (agains >= first)
            if again >= 0:
                meets |= (firsts <= again) | (agains >= 0)
            begin, end = begins[meets], ends[meets]
            offset = 0
            if begin.size:
                below = np.maximum.accumulate(end)
                holes = begin.copy()
                holes[1:] -= below[:-1]
                hole = int((holes >= size).argmax())
                if holes[hole] < size:
                    offset = int(below[-1])
                elif hole:
                    offset = int(below[hole - 1])
            offsets[one] = offset
            at = int(np.searchsorted(begins, offset, side="right"))
            placed[:, at + 1 : filled + 1] = placed[:, at:filled]
            placed[:, at] = (first, last, again, offset, offset + size)
        return offsets
