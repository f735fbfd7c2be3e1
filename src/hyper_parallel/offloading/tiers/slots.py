"""Slot table of a tier: offsets, and what each slot holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers.copies import Copy


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """The bytes `first` … `last` − 1 of a tier."""

    first: int
    last: int

    @property
    def bytes(self) -> int:
        """How many."""
        return self.last - self.first

    def meets(self, other: SlotPlacement) -> bool:
        """Whether they have a byte in common."""
        return self.first < other.last and other.first < self.last


@dataclass
class Slots:
    """The slots of one tier."""

    name: str
    """The tier's, for messages."""
    places: dict[int, SlotPlacement] = field(default_factory=dict)
    written: dict[int, Copy] = field(default_factory=dict)
    """Slot to the copy that put there what is in it."""
    _sharing: dict[int, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Bytes of the tier up to the end of the last slot."""
        return max((place.last for place in self.places.values()), default=0)

    def replaced(self, places: dict[int, SlotPlacement]) -> Slots:
        """The same tier with other slots: those that stay hold what they held.

        Raises TierError if two of them would lie in the same bytes, or one has become too small for what is in it.
        """
        kept = {slot: copy for slot, copy in self.written.items() if slot in places}
        found = Slots(self.name, places, kept, sharing(places))
        for slot, copy in kept.items():
            if copy.bytes > places[slot].bytes:
                raise TierError(
                    f"slot {slot} of the {self.name} tier holds {copy.bytes} bytes and was to have "
                    f"{places[slot].bytes} from now on; a slot that stays must keep its size"
                )
            for other in found._sharing[slot]:
                if other in kept:
                    raise TierError(
                        f"slots {slot} and {other} of the {self.name} tier both hold something and were to share "
                        "memory from now on; give slots that live together offsets that do not overlap"
                    )
        return found

    def for_write(self, slot: int, x: torch.Tensor) -> SlotPlacement:
        """Where the bytes of `x` go. What shares memory with the slot is gone from now on."""
        place = self._place(slot, x)
        if x.numel() > place.bytes:
            raise TierError(
                f"{x.numel()} bytes were to be written to slot {slot} of the {self.name} tier, which has room for "
                f"{place.bytes}; reserve more for it"
            )
        for other in (slot, *self._sharing[slot]):
            self.written.pop(other, None)
        return SlotPlacement(place.first, place.first + x.numel())

    def for_read(self, slot: int, x: torch.Tensor) -> tuple[SlotPlacement, Copy]:
        """Where the bytes for `x` come from, and the copy that put them there."""
        place = self._place(slot, x)
        source = self._source(slot, "read")
        if source.bytes != x.numel():
            raise TierError(
                f"slot {slot} of the {self.name} tier holds {source.bytes} bytes, and {x.numel()} were to be read"
            )
        return SlotPlacement(place.first, place.first + x.numel()), source

    def for_work(self, slot: int) -> tuple[SlotPlacement, Copy]:
        """Where the bytes are that were last written to a slot, and what put them there."""
        source = self._source(slot, "computed on by the host")
        first = self.places[slot].first
        return SlotPlacement(first, first + source.bytes), source

    def _source(self, slot: int, wanted: str) -> Copy:
        source = self.written.get(slot)
        if source is None:
            raise TierError(
                f"slot {slot} of the {self.name} tier was to be {wanted}, and nothing is in it: it was never written, "
                "or a slot that shares its memory was written after it"
            )
        return source

    def _place(self, slot: int, x: torch.Tensor) -> SlotPlacement:
        assert (x.dtype, x.dim(), x.is_contiguous()) == (torch.uint8, 1, True), "x is the bytes of a storage"
        if slot not in self.places:
            raise TierError(
                f"the {self.name} tier has no slot {slot}; reserve it first ({len(self.places)} are reserved)"
            )
        return self.places[slot]


def lay(
    name: str, sizes: Mapping[int, int], offsets: Mapping[int, int] | None, align: int
) -> dict[int, SlotPlacement]:
    """Slot to its place: where `offsets` say, or one after the other, each at a multiple of `align`."""
    if offsets is None:
        at, places = 0, {}
        for slot, count in sizes.items():
            places[slot] = SlotPlacement(at, at + count)
            at += -(-count // align) * align
        return places
    for slot in sizes:
        if slot not in offsets:
            raise TierError(f"slot {slot} of the {name} tier was given no offset, and others were")
        if offsets[slot] < 0 or offsets[slot] % align:
            raise TierError(
                f"slot {slot} of the {name} tier was given the offset {offsets[slot]}; it must be a multiple of {align}"
            )
    return {slot: SlotPlacement(offsets[slot], offsets[slot] + count) for slot, count in sizes.items()}


def sharing(places: Mapping[int, SlotPlacement]) -> dict[int, list[int]]:
    """Slot to the others that share a byte with it."""
    found: dict[int, list[int]] = {slot: [] for slot in places}
    open_: list[int] = []
    for slot in sorted(places, key=lambda slot: places[slot].first):
        open_ = [other for other in open_ if places[other].last > places[slot].first]
        for other in open_:
            if places[slot].meets(places[other]):
                found[slot].append(other)
                found[other].append(slot)
        open_.append(slot)
    return found
