"""Weights in tiers: each module's bytes in slots of host, pool or flash, written once and read in every pass.

Modules are spread over the tiers in proportion to what each holds, so that all links are busy at once. A table is cut
into slots of whole rows, of which single ones are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.weights.units import Unit, by_module
from hyper_parallel.offloading.tiers import Pending, Tier, Workplace
from hyper_parallel.units import format_bytes

Fill = Callable[[Unit, int, Tensor], None]
"""Puts a module's bytes, from one on, into a buffer: all of them, or whole rows of a table."""
_ROWS = 1 << 19
"""Bytes of a slot of a table, at least."""


@dataclass(frozen=True)
class _Slot:
    tier: str
    number: int
    first: int
    last: int


class WeightTiers:
    """Where the bytes of modules are."""

    def __init__(self, units: Sequence[Unit], tiers: Mapping[str, Tier], room: Mapping[str, int]) -> None:
        """`room`: bytes of each tier for weights. Raises ConfigError where they do not hold the modules."""
        self._tiers = tiers
        self._slots: dict[Unit, list[_Slot]] = {}
        self.read: Counter[str] = Counter()
        """Bytes that were read from each tier."""
        shares, left = _shares(units, room), dict(room)
        sizes: dict[str, dict[int, int]] = {name: {} for name in tiers}
        placed: Counter[str] = Counter()
        total = 0
        for unit in units:
            total += unit.bytes
            name = min(
                (name for name in tiers if left[name] >= _rounded(unit, tiers[name])),
                key=lambda name: placed[name] - shares[name] * total,
                default=None,
            )
            if name is None:
                raise ConfigError(
                    f"the weights that may leave the device have {format_bytes(sum(one.bytes for one in units))}, and "
                    f"the tiers hold {format_bytes(sum(room.values()))} beside the KV cache; raise memory.host or "
                    "memory.pool, or set memory.flash to a folder"
                )
            left[name] -= _rounded(unit, tiers[name])
            placed[name] += unit.bytes
            self._slots[unit] = [
                _Slot(name, len(sizes[name]) + place, first, last)
                for place, (first, last) in enumerate(_cuts(unit))
            ]
            sizes[name].update({slot.number: slot.last - slot.first for slot in self._slots[unit]})
        self.bytes = {name: sum(found.values()) for name, found in sizes.items()}
        """Bytes of weights in each tier."""
        self.taken = {
            name: sum(-(-count // tiers[name].align) * tiers[name].align for count in found.values())
            for name, found in sizes.items()
        }
        """Bytes of each tier that these need."""
        with outside_modes():
            for name, tier in tiers.items():
                if sizes[name]:
                    tier.reserve(sizes[name])

    def write(self, unit: Unit, buffer: Tensor, fill: Fill) -> None:
        """Write a module's bytes. `buffer`: uint8 on the device, of at least `slot_bytes`; `fill` puts them there."""
        for slot in self._slots[unit]:
            part = buffer[: slot.last - slot.first]
            fill(unit, slot.first, part)
            with outside_modes():
                self._tiers[slot.tier].begin_write(slot.number, part).wait()
            if buffer.device.type != "cpu":  # over for the device's stream is not over for the host
                torch.get_device_module(buffer.device).synchronize()

    def begin_read(self, unit: Unit, buffer: Tensor) -> list[Pending]:
        """Begin to read all of a module to a buffer, uint8 [bytes] on the device."""
        with outside_modes():
            pending = []
            for slot in self._slots[unit]:
                self.read[slot.tier] += slot.last - slot.first
                pending.append(self._tiers[slot.tier].begin_read(slot.number, buffer[slot.first : slot.last]))
            return pending

    def in_memory(self, unit: Unit) -> bool:
        """Whether the host can compute with a module's bytes where they lie."""
        return isinstance(self._tiers[self._slots[unit][0].tier], Workplace)

    def in_place(self, unit: Unit) -> Tensor:
        """A module's bytes where they lie, uint8 [bytes] of the tier's own memory; for one that is `in_memory`."""
        (slot,) = self._slots[unit]
        tier = self._tiers[slot.tier]
        assert isinstance(tier, Workplace), "the host cannot compute there"
        with outside_modes():
            return tier.in_place(slot.number)

    def memory(self) -> list[Tensor]:
        """What operators may be given of tiers' own memory: tensors that share storages with it."""
        units = {slots[0].tier: unit for unit, slots in self._slots.items() if unit.expert is not None}
        return [self.in_place(unit) for unit in units.values() if self.in_memory(unit)]

    def rows(self, unit: Unit, wanted: Tensor) -> Tensor:
        """Rows [U, D] of a table by their numbers in ascending order, int64 [U]."""
        part, row = unit.parts[0], unit.row
        numbers = wanted.tolist()
        found = torch.empty(len(numbers), *part.shape[1:], dtype=part.dtype, device=wanted.device)
        flat = found.view(torch.uint8).view(len(numbers), row) if numbers else found
        host = torch.empty(len(numbers), row, dtype=torch.uint8) if wanted.device.type != "cpu" else flat
        place = 0
        for slot in self._slots[unit]:
            begin = place
            while place < len(numbers) and numbers[place] * row < slot.last:
                place += 1
            if begin == place:
                continue
            at = [number - slot.first // row for number in numbers[begin:place]]
            tier = self._tiers[slot.tier]
            if isinstance(tier, Workplace):
                self._gather(tier, slot, at, host[begin:place], row)
                if host is not flat:
                    flat[begin:place].copy_(host[begin:place])
                continue
            buffer = torch.empty(slot.last - slot.first, dtype=torch.uint8, device=wanted.device)
            with outside_modes():
                tier.begin_read(slot.number, buffer).wait()
            self.read[slot.tier] += buffer.numel()
            flat[begin:place] = buffer.view(-1, row)[at]
        return found

    def _gather(self, tier: Workplace, slot: _Slot, at: list[int], out: Tensor, row: int) -> None:
        def work(memory: Sequence[Tensor]) -> None:
            table = memory[0].view(-1, row)
            for target, source in enumerate(at):
                out[target] = table[source]

        with outside_modes():
            tier.begin_work("looking up rows of the embedding", [slot.number], work).wait()
        self.read[slot.tier] += out.numel()


def movable(units: Sequence[Unit], tiers: Mapping[str, Tier], room: Mapping[str, int]) -> list[Unit]:
    """Modules that the tiers hold, as many as there is room for; the others stay on the device. Of experts all of a
    module, since their weights are one stack."""
    left = dict(room)
    found = []
    for group in by_module(units):
        after = dict(left)
        for unit in group:
            name = max(after, key=lambda name: after[name], default=None)
            if name is None or after[name] < _rounded(unit, tiers[name]):
                break
            after[name] -= _rounded(unit, tiers[name])
        else:
            left = after
            found += group
    return found


def slot_bytes(unit: Unit) -> int:
    """Bytes of a module that are written at once."""
    return max(last - first for first, last in _cuts(unit))


def _cuts(unit: Unit) -> list[tuple[int, int]]:
    """First and last byte of each slot."""
    if not unit.tables:
        return [(0, unit.bytes)]
    size = -(-_ROWS // unit.row) * unit.row
    end = unit.parts[0].bytes
    return [(first, min(first + size, end)) for first in range(0, end, size)]


def _rounded(unit: Unit, tier: Tier) -> int:
    return sum(-(-(last - first) // tier.align) * tier.align for first, last in _cuts(unit))


def _shares(units: Sequence[Unit], room: Mapping[str, int]) -> dict[str, float]:
    """The part of all bytes that each tier holds: the faster ones as much as they can."""
    total = left = max(sum(unit.bytes for unit in units), 1)
    shares = {}
    for name, bytes_ in room.items():
        shares[name] = min(bytes_, left) / total
        left -= min(bytes_, left)
    return shares
