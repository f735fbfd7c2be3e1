"""Streamed weights: each module's bytes come from a tier while the modules before it compute.

Modules that are not resident have a hook before and a hook behind their forward pass. Between the two their weights are
views of the stream buffer; else they are `AwayWeight`s. The order of use is that of the last pass: as soon as a module
is done, the next ones in that order are read into the room that it leaves, over the end of a pass into the next one. A
module that is needed out of turn is read then and there. A table of which rows are looked up is never read whole for
that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.weights.away_weight import AwayWeight
from hyper_parallel.inference.weights.buffer import Region, StreamBuffer
from hyper_parallel.inference.weights.tiers import WeightTiers
from hyper_parallel.inference.weights.units import Unit
from hyper_parallel.offloading.tiers import Pending
from hyper_parallel.shard.sharded_parameter import local_of


class _Loaded:
    """A module whose bytes are in the buffer, or on their way."""

    def __init__(self, region: Region, pending: list[Pending]) -> None:
        self.region, self.pending, self.uses = region, pending, 0


class WeightStream:
    """The weights of one model. `units`: those that may leave the device; their values are in the tiers already."""

    def __init__(
        self, model: nn.Module, units: Iterable[Unit], tiers: WeightTiers, device: torch.device
    ) -> None:
        self.units = tuple(units)
        self.device = device
        self.tiers = tiers
        self.stall = 0.0
        """Seconds in which the thread that computes waited for weights."""
        self._model = model
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._buffer = StreamBuffer(0)
        self._loaded: dict[Unit, _Loaded] = {}
        self._resident: dict[Unit, Tensor] = {}
        self._hooks: list[Any] = []
        self._order: list[Unit] = []
        self._next = 0
        self._seen: list[Unit] = []
        self._originals: dict[tuple[int, str], Any] = {
            (id(owner), own): owner._parameters[own]
            for unit in self.units
            for part in unit.parts
            for owner, own in part.owners
        }
        self._away = {
            (id(owner), own): AwayWeight.of(
                torch.empty(part.shape, dtype=part.dtype, device="meta"),
                device,
                unit.name,
                partial(tiers.rows, unit) if owner in unit.tables else None,
            )
            for unit in self.units
            for part in unit.parts
            for owner, own in part.owners
        }
        for unit in self.units:
            self._set_away(unit, also_tables=True)

    def place(self, resident: Iterable[Unit], gathered: Iterable[Unit], buffer: int) -> None:
        """From now on the weights of `resident` stay on the device, rows of `gathered` are looked up in their tier, and
        all others are streamed through a buffer of `buffer` bytes."""
        self._settle()
        stays, looked_up = set(resident), set(gathered)
        for unit in self.units:
            if unit not in stays and unit in self._resident:
                self._set_away(unit, also_tables=True)
                del self._resident[unit]
        self._arena = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._arena = torch.empty(buffer, dtype=torch.uint8, device=self.device)
        self._buffer = StreamBuffer(buffer)
        for unit in self.units:
            if unit in stays and unit not in self._resident:
                self._make_resident(unit)
        streamed = [unit for unit in self.units if unit not in stays and unit not in looked_up]
        for unit in streamed:
            self._hooks += [
                unit.module.register_forward_pre_hook(partial(self._before, unit)),
                unit.module.register_forward_hook(partial(self._behind, unit), always_call=True),
            ]
        if streamed:
            self._hooks += [
                self._model.register_forward_pre_hook(self._begin_pass),
                self._model.register_forward_hook(self._end_pass),
            ]
        self._order, self._next, self._seen = streamed, 0, []

    @property
    def fixed(self) -> int:
        """Bytes of weights and buffers that no unit has."""
        return storage_bytes(self._present()) - sum(one.nbytes for one in self._resident.values())

    def tensors(self) -> list[Tensor]:
        """All weights and buffers that are on the device, and the buffer that weights are streamed through."""
        return [*self._present(), *self._resident.values(), self._arena]

    def constant(self) -> frozenset[int]:
        """Identities of what stands in modules for weights in tiers, which nobody can write to."""
        return frozenset(map(id, self._away.values()))

    def keep(self, name: str) -> int:
        """The weights of a unit stay on the device from now on, as if they had never been able to leave; their
        bytes."""
        self._settle()
        unit = next(one for one in self.units if one.name == name)
        self.units = tuple(one for one in self.units if one is not unit)
        self._give_back(unit)
        return unit.bytes

    def close(self, restore: bool) -> None:
        """End; with `restore`, all weights come back to the parameters that the model had."""
        self._settle()
        self._arena = torch.empty(0, dtype=torch.uint8, device=self.device)
        for unit in self.units:
            if restore:
                self._give_back(unit)
            else:
                self._set_away(unit, also_tables=True)
        self._resident.clear()

    def _present(self) -> list[Tensor]:
        return [local_of(x) for x in (*self._model.parameters(), *self._model.buffers()) if not x.is_meta]

    def _before(self, unit: Unit, *_: Any) -> None:
        """A module's forward pass begins."""
        found = self._loaded.get(unit)
        if found is None:
            found = self._loaded[unit] = self._read(unit, self._room_for(unit))
        if not found.uses:
            started = time.perf_counter()
            for pending in found.pending:
                pending.wait()
            self.stall += time.perf_counter() - started
            found.pending = []
            self._set(unit, self._arena[found.region.first : found.region.last], also_tables=False)
            self._seen.append(unit)
            self._advance(unit)
        found.uses += 1
        self._prefetch()

    def _behind(self, unit: Unit, *_: Any) -> None:
        """It is over; also where it failed."""
        found = self._loaded.get(unit)
        if found is None or not found.uses:
            return
        found.uses -= 1
        if not found.uses:
            self._set_away(unit, also_tables=False)
            self._drop(unit)
            self._prefetch()

    def _begin_pass(self, *_: Any) -> None:
        self._seen, self._next = [], 0
        self._prefetch()

    def _end_pass(self, *_: Any) -> None:
        self._order = self._seen or self._order
        self._next = 0
        self._prefetch()

    def _advance(self, unit: Unit) -> None:
        """The place in the order behind this use of a module."""
        count = len(self._order)
        for ahead in range(count):
            place = (self._next + ahead) % count
            if self._order[place] is unit:
                self._next = (place + 1) % count
                return

    def _prefetch(self) -> None:
        """Begin to read the next modules, as far as there is room."""
        count = len(self._order)
        for ahead in range(count):
            unit = self._order[(self._next + ahead) % count]
            if unit in self._loaded:
                continue
            region = self._buffer.take(unit.bytes)
            if region is None:
                return
            self._loaded[unit] = self._read(unit, region)

    def _read(self, unit: Unit, region: Region) -> _Loaded:
        return _Loaded(region, self.tiers.begin_read(unit, self._arena[region.first : region.last]))

    def _room_for(self, unit: Unit) -> Region:
        """Room for a module that was not foreseen, in place of what was read for later."""
        while (region := self._buffer.take(unit.bytes)) is None:
            idle = next((other for other in reversed(self._loaded) if not self._loaded[other].uses), None)
            if idle is None:
                raise UnsupportedModelError(
                    f"{unit.name} computes inside of another module whose weights are streamed, and the buffer has no "
                    "room for both; raise memory.device"
                )
            self._drop(idle)
        return region

    def _give_back(self, unit: Unit) -> None:
        """Give the model's own parameters their values again, each in memory of its own."""
        self._resident.pop(unit, None)
        memory = torch.empty(unit.bytes, dtype=torch.uint8, device=self.device)
        for pending in self.tiers.begin_read(unit, memory):
            pending.wait()
        for part in unit.parts:
            value = part.view(memory).clone()
            parameter = self._originals[id(part.owners[0][0]), part.owners[0][1]]
            if parameter.is_meta:
                parameter = nn.Parameter(value, requires_grad=False)
            else:
                parameter.data = value
            for owner, own in part.owners:
                owner._parameters[own] = parameter

    def _make_resident(self, unit: Unit) -> None:
        memory = torch.empty(unit.bytes, dtype=torch.uint8, device=self.device)
        for pending in self.tiers.begin_read(unit, memory):
            pending.wait()
        self._resident[unit] = memory
        self._set(unit, memory, also_tables=True)

    def _drop(self, unit: Unit) -> None:
        found = self._loaded.pop(unit)
        for pending in found.pending:
            pending.wait()
        self._buffer.give(found.region)

    def _settle(self) -> None:
        """As if no module had ever been streamed."""
        for unit in list(self._loaded):
            self._drop(unit)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _set(self, unit: Unit, memory: Tensor, also_tables: bool) -> None:
        for part in unit.parts:
            value = part.view(memory)
            for owner, own in part.owners:
                if also_tables or owner not in unit.tables:
                    owner._parameters[own] = value  # type: ignore[assignment]

    def _set_away(self, unit: Unit, also_tables: bool) -> None:
        for part in unit.parts:
            for owner, own in part.owners:
                if also_tables or owner not in unit.tables:
                    owner._parameters[own] = self._away[id(owner), own]  # type: ignore[assignment]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, each once."""
    return sum({id(one): one.nbytes() for one in [x.untyped_storage() for x in tensors]}.values())
