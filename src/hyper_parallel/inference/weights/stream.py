"""Streamed weights: each module's bytes come from a tier while the modules before it compute.

Modules that are not resident have a hook before and a hook behind their forward pass. Between the two their weights are
views of the buffer of `read_ahead`; else they are `AwayWeight`s. Experts are taken one by one, as their module's code
takes them (`streamed_experts`). A table whose rows are looked up is never read whole for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.inference.memory_plan import Module
from hyper_parallel.inference.weights import weight_stand_in
from hyper_parallel.inference.weights.read_ahead import Choice, ReadAhead
from hyper_parallel.inference.weights.tiers import WeightTiers
from hyper_parallel.inference.weights.units import Part, Unit, by_module
from hyper_parallel.inference.weights.weight_stand_in import AwayWeight, StreamedExperts
from hyper_parallel.shard.sharded_model import local_of


class WeightStream:
    """The weights of one model. `units`: those that may leave the device; their values are in the tiers already."""

    def __init__(
        self, model: nn.Module, units: Iterable[Unit], tiers: WeightTiers, device: torch.device
    ) -> None:
        self.units = tuple(units)
        self.device = device
        self.tiers = tiers
        self._model = model
        self._reader = ReadAhead(tiers, device)
        self._resident: dict[Unit, Tensor] = {}
        self._hooks: list[Any] = []
        host_tokens = weight_stand_in.HOST_TOKENS if device.type == "cpu" else 0
        self._experts = {
            group[0].module: StreamedExperts(group, self._reader, tiers, self._resident, host_tokens)
            for group in by_module(self.units)
            if group[0].experts
        }
        weights = [
            (unit, number, part, owner, own)
            for unit in self.units
            if not unit.expert
            for number, part in enumerate(unit.parts)
            for owner, own in part.owners
        ]
        self._originals: dict[tuple[int, str], Any] = {
            (id(owner), own): owner._parameters[own] for _, _, _, owner, own in weights
        }
        self._away = {
            (id(owner), own): self._away_weight(unit, number, part, owner)
            for unit, number, part, owner, own in weights
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
        order: list[Unit | Choice] = []
        streamed = [unit for unit in self.units if unit not in stays and unit not in looked_up]
        for unit, *_ in by_module(streamed):
            experts = self._experts.get(unit.module)
            order.append(unit if experts is None else experts.choice)
        self._reader.place(buffer, order)
        for unit in self.units:
            if unit in stays and unit not in self._resident:
                self._make_resident(unit)
        for unit, *_ in by_module(streamed):
            experts = self._experts.get(unit.module)
            before, behind = (
                (partial(self._before, unit), partial(self._behind, unit))
                if experts is None
                else (experts.begin, experts.end)
            )
            self._hooks += [
                unit.module.register_forward_pre_hook(before),
                unit.module.register_forward_hook(behind, always_call=True),
            ]
        if streamed:
            self._hooks += [
                self._model.register_forward_pre_hook(lambda *_: self._reader.begin_pass()),
                self._model.register_forward_hook(lambda *_: self._reader.end_pass()),
            ]

    @property
    def stall(self) -> float:
        """Seconds in which the thread that computes waited for weights."""
        return self._reader.stall

    @property
    def sizes(self) -> tuple[Module, ...]:
        """The units with their sizes, for the plan."""
        return tuple(
            unit.size if unit.expert is None else replace(unit.size, chance=self._experts[unit.module].chance)
            for unit in self.units
        )

    @property
    def fixed(self) -> int:
        """Bytes of weights and buffers that no unit has."""
        placed = [memory.nbytes for unit, memory in self._resident.items() if unit.expert is None]
        return storage_bytes(self._present()) - sum(placed)

    def tensors(self) -> list[Tensor]:
        """All weights and buffers that are on the device, and the buffer that weights are streamed through."""
        return [*self._present(), *self._resident.values(), self._reader.memory]

    def known(self) -> list[Tensor]:
        """Tensors that operators see besides those that a pass computes: `tensors()`, and memory of tiers that is read
        in place."""
        return [*self.tensors(), *self.tiers.memory()]

    def constant(self) -> frozenset[int]:
        """Identities of what stands in modules for weights in tiers, which nobody can write to."""
        return frozenset(map(id, self._away.values()))

    def keep(self, name: str) -> int:
        """The weights of a module stay on the device from now on, as if they had never been able to leave; their
        bytes."""
        self._settle()
        units = [one for one in self.units if one.name == name]
        self.units = tuple(one for one in self.units if one.name != name)
        self._experts.pop(units[0].module, None)
        self._give_back(units)
        return sum(unit.bytes for unit in units)

    def close(self, restore: bool) -> None:
        """End; with `restore`, all weights come back to the parameters that the model had."""
        self._settle()
        self._reader.place(0, ())
        for units in by_module(self.units):
            if restore:
                self._give_back(units)
            else:
                self._set_away(units[0], also_tables=True)
        self._resident.clear()

    def _present(self) -> list[Tensor]:
        return [local_of(x) for x in (*self._model.parameters(), *self._model.buffers()) if not x.is_meta]

    def _away_weight(self, unit: Unit, number: int, part: Part, owner: nn.Module) -> AwayWeight:
        """The stand-in for a weight in a module."""
        shape = part.shape if unit.expert is None else (unit.experts, *part.shape)
        rows = partial(self.tiers.rows, unit) if owner in unit.tables else None
        found = AwayWeight.of(shape, part.dtype, self.device, unit.name, rows)
        found.experts, found.number = self._experts.get(unit.module), number
        return found

    def _before(self, unit: Unit, *_: Any) -> None:
        """A module's forward pass begins."""
        memory = self._reader.acquire(unit)
        if memory is not None:
            self._set(unit, memory, also_tables=False)

    def _behind(self, unit: Unit, *_: Any) -> None:
        """It is over; also where it failed."""
        if self._reader.release(unit):
            self._set_away(unit, also_tables=False)

    def _give_back(self, units: Sequence[Unit]) -> None:
        """Give the model's own parameters of a module their values again, each in its own memory."""
        values: dict[int, Tensor] = {}
        for unit in units:
            self._resident.pop(unit, None)
            memory = self._read(unit)
            for number, part in enumerate(unit.parts):
                value = part.view(memory)
                if part.expert is None:
                    values[number] = value.clone()
                    continue
                if number not in values:
                    values[number] = value.new_empty(unit.experts, *part.shape)
                values[number][part.expert] = value
        for number, part in enumerate(units[0].parts):
            parameter = self._originals[id(part.owners[0][0]), part.owners[0][1]]
            if parameter.is_meta:
                parameter = nn.Parameter(values[number], requires_grad=False)
            else:
                parameter.data = values[number]
            for owner, own in part.owners:
                owner._parameters[own] = parameter

    def _make_resident(self, unit: Unit) -> None:
        self._resident[unit] = self._read(unit)
        if unit.expert is None:
            self._set(unit, self._resident[unit], also_tables=True)

    def _read(self, unit: Unit) -> Tensor:
        """Its bytes in memory of their own."""
        memory = torch.empty(unit.bytes, dtype=torch.uint8, device=self.device)
        for pending in self.tiers.begin_read(unit, memory):
            pending.wait()
        return memory

    def _settle(self) -> None:
        """As if no module had ever been streamed."""
        for experts in self._experts.values():
            experts.leave()
        self._reader.settle()
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
