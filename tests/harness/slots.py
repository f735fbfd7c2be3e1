"""A tier of plain tensors, whose copies are made when they are waited for, or at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hyper_parallel.graph import StepGraph
from hyper_parallel.offloading.runtime import Runtime


class Copied:
    """A copy that is made at the last moment, so that whoever does not wait finds nothing."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source

    def wait(self) -> float:
        self._target.copy_(self._source)
        return 0.0

    def done(self) -> bool:
        return False

    seconds = None
    """Nobody measures it."""


class Shelf:
    """A tier."""

    align = 1

    def __init__(self, name: str = "host", capacity: int = 2**40) -> None:
        self.name, self.capacity = name, capacity
        self.held: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, step: StepGraph) -> Shelf:
        """With all slots of a step."""
        shelf = cls()
        shelf.reserve({number: slot.bytes for number, slot in step.slots.items()})
        return shelf

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        self.held = {
            slot: self.held.get(slot, torch.zeros(size, dtype=torch.uint8)) for slot, size in sizes.items()
        }

    def begin_write(self, slot: int, x: torch.Tensor) -> Copied:
        return Copied(self.held[slot], x)

    def begin_read(self, slot: int, x: torch.Tensor) -> Copied:
        x.fill_(0xA5)
        return Copied(x, self.held[slot])

    def begin_work(
        self, what: str, slots: Sequence[int], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> Copied:
        work([self.held[slot] for slot in slots])
        nothing = torch.empty(0)
        return Copied(nothing, nothing)

    def close(self) -> None:
        self.held.clear()


class Poisoning(Runtime):
    """Gives up no memory and overwrites it, so that reading it too late is seen and does not end the process."""

    def detach(self, x: torch.Tensor, slot: int, tier: str) -> None:
        x.untyped_storage().fill_(0xA5)

    def prefetch(self, x: torch.Tensor, slot: int, tier: str) -> None:
        super().prefetch(x, slot, tier)
