"""Slot allocator: places the slots of several plans in one tier.

Steps of different shapes have plans of their own, and one runs at a time. So of what a tier holds

    size = Σ slots that rest there between steps, of all plans + max over plans of what lives within one step only

A storage that lives on, a parameter or a moment, has one slot in a tier, which all plans share: going over to another
plan copies only what that one wants elsewhere. Slots that rest keep their places while a plan needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hyper_parallel.graph import Slot, StepGraph
from hyper_parallel.offloading.schedule.arena_offsets import pack

ALIGN = 4096
"""Bytes on whose multiples slots begin, so that files can be read past the system's cache."""


@dataclass(frozen=True)
class Places:
    """Where slots lie in a tier."""

    sizes: Mapping[int, int] = field(default_factory=dict)
    """Slot to bytes."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """Slot to its first byte; slots that are never needed at the same time may share memory."""
    size: int = 0
    """Of all together."""

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
        """Of all slots in the tier."""
        sizes, offsets = dict(self.rest.sizes), dict(self.rest.offsets)
        for _, within in self.plans.values():
            sizes.update(within.sizes)
            offsets.update({number: self.rest.size + at for number, at in within.offsets.items()})
        return Places(sizes, offsets, self.size)


@dataclass(frozen=True)
class SlotAllocator:
    """Those of all tiers."""

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
