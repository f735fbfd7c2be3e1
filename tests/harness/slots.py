"""A tier of plain tensors, which does everything at the last moment that its contract allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hyper_parallel.graph import StepGraph
from hyper_parallel.offloading.runtime import Runtime


class Late:
    """A copy, or work of the host, that is done when it is waited for, or when something is that comes after it: so
    that who does not wait finds nothing, and who takes away too early what it needs spoils it."""

    def __init__(self, does: Callable[[], object], before: Sequence[Late]) -> None:
        self._does, self._before = does, before
        self._over = False

    def wait(self) -> float:
        if not self._over:
            for other in self._before:
                other.wait()
            self._does()
            self._over, self._before = True, ()
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
        self._last: dict[int, Late] = {}
        """Slot to what was begun with it last."""
        self._work: tuple[Late, ...] = ()
        """The last work."""

    @classmethod
    def of(cls, step: StepGraph) -> Shelf:
        """With all slots of a step."""
        shelf = cls()
        shelf.reserve({number: slot.bytes for number, slot in step.slots.items()})
        return shelf

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        for late in self._last.values():
            late.wait()
        self.held = {
            slot: self.held.get(slot, torch.zeros(size, dtype=torch.uint8)) for slot, size in sizes.items()
        }

    def begin_write(self, slot: int, x: torch.Tensor) -> Late:
        return self._begun((slot,), lambda: self.held[slot].copy_(x))

    def begin_read(self, slot: int, x: torch.Tensor) -> Late:
        x.fill_(0xA5)
        return self._begun((slot,), lambda: x.copy_(self.held[slot]))

    def begin_work(
        self, what: str, slots: Sequence[int], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> Late:
        late = self._begun(slots, lambda: work([self.held[slot] for slot in slots]), self._work)
        self._work = (late,)
        return late

    def in_place(self, slot: int) -> torch.Tensor:
        if slot in self._last:
            self._last[slot].wait()
        return self.held[slot]

    def _begun(self, slots: Sequence[int], does: Callable[[], object], before: Sequence[Late] = ()) -> Late:
        late = Late(does, [*before, *(self._last[slot] for slot in slots if slot in self._last)])
        self._last.update(dict.fromkeys(slots, late))
        return late

    def close(self) -> None:
        self.held.clear()


class Poisoning(Runtime):
    """Gives up no memory and overwrites it, so that reading it too late is seen and does not end the process."""

    def detach(self, x: torch.Tensor, slot: int, tier: str) -> None:
        x.untyped_storage().fill_(0xA5)

    def prefetch(self, x: torch.Tensor, slot: int, tier: str) -> None:
        super().prefetch(x, slot, tier)
