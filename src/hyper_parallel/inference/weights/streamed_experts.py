"""Experts of a mixture, read one by one: of a layer only those that its tokens choose, each once in a pass.

The module's own code takes its experts' matrices from the stacks [E, ...] by number, one expert after the other. Where
it does, an expert that stays on the device is there; one that few tokens reach and that lies in memory of the host is
computed with there, on a processor without a copy; all others are read to the buffer in the order of their numbers,
the next ones while one computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hyper_parallel.inference.weights.read_ahead import Choice, ReadAhead
from hyper_parallel.inference.weights.tiers import WeightTiers
from hyper_parallel.inference.weights.units import Unit

HOST_TOKENS = 30
"""Tokens that reach an expert, up to which the host computes with it where it lies. A link to an accelerator reads a
weight at a quarter of the speed of the host's memory, and a product of up to about as many rows takes the host as long
as reading the weight. On an accelerator no expert is computed on the host, since its products have other bits."""


class StreamedExperts:
    """The experts of one module: as `away_weight.Experts`."""

    def __init__(
        self,
        units: Sequence[Unit],
        reader: ReadAhead,
        tiers: WeightTiers,
        resident: Mapping[Unit, Tensor],
        host_tokens: int,
    ) -> None:
        """`units`: one for each expert. `resident`: the bytes of those that stay on the device, which change."""
        self.units = tuple(units)
        self.host_tokens = host_tokens
        self.chance = 1.0
        """That a token chooses an expert, K/E, once it is known."""
        self.choice = Choice(sum(sorted(unit.bytes for unit in units)[-2:]))
        self._reader, self._tiers, self._resident = reader, tiers, resident
        self._in_place: set[int] = set()
        self._expert: int | None = None
        self._memory: Tensor | None = None

    def choose(self, counts: Sequence[int], each: int) -> None:
        """As `away_weight.Experts`."""
        self.chance = min(each / len(self.units), 1.0)
        chosen = [
            unit
            for unit, count in zip(self.units, counts, strict=True)
            if count and unit not in self._resident
        ]
        self._in_place = {
            unit.expert
            for unit in chosen
            if unit.expert is not None
            and counts[unit.expert] <= self.host_tokens
            and self._tiers.in_memory(unit)
        }
        self._reader.choose([unit for unit in chosen if unit.expert not in self._in_place])

    def weight(self, number: int, expert: int) -> Tensor:
        """As `away_weight.Experts`."""
        if expert != self._expert:
            self.leave()
            self._memory, self._expert = self._bytes(self.units[expert]), expert
        assert self._memory is not None
        return self.units[expert].parts[number].view(self._memory)

    def begin(self, *_: Any) -> None:
        """The module's forward pass begins."""
        self._reader.reach(self.choice)

    def end(self, *_: Any) -> None:
        """It is over, or failed."""
        self.leave()
        self._in_place = set()
        self._reader.choose(())

    def leave(self) -> None:
        """The expert that was taken last is not used any more."""
        if self._expert is not None:
            self._reader.release(self.units[self._expert])
        self._memory = self._expert = None

    def _bytes(self, unit: Unit) -> Tensor | None:
        if unit in self._resident:
            return self._resident[unit]
        if unit.expert in self._in_place:
            return self._tiers.in_place(unit)
        return self._reader.acquire(unit)
