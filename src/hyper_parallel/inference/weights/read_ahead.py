"""Reading ahead: modules come from their tiers into a buffer on the device while the modules before them compute.

The order of use is that of the last pass: as soon as a module is done, the next ones in that order are read into the
room that it leaves, over the end of a pass into the next one. A module that is needed out of turn is read then and
there. Which experts of a mixture are used is known when the router has chosen: they are then read before all others,
for which the modules behind them leave room until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.run_allocator import Run, RunAllocator
from hyper_parallel.inference.weights.tiers import WeightTiers
from hyper_parallel.inference.weights.units import ALIGN, Unit
from hyper_parallel.offloading.tiers import Pending


@dataclass(frozen=True, eq=False)
class Choice:
    """A place in the order at which a pass uses modules that it chooses then. `room`: bytes that these need."""

    room: int


class ReadAhead:
    """Modules on their way to the device."""

    def __init__(self, tiers: WeightTiers, device: torch.device) -> None:
        self.stall = 0.0
        """Seconds in which the thread that computes waited for weights."""
        self._tiers, self._device = tiers, device
        self._order: list[Unit | Choice] = []
        self.place(0, ())

    def place(self, size: int, order: Iterable[Unit | Choice]) -> None:
        """Use a buffer of `size` bytes, and at first this order. Nothing is loaded then."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        """The buffer, uint8."""
        self.memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._buffer = StreamBuffer(size)
        self._loaded: dict[Unit, _Loaded] = {}
        self._chosen: list[Unit] = []
        self._order, self._next, self._seen = list(order), 0, list[Unit | Choice]()

    def begin_pass(self) -> None:
        """A pass through the model begins."""
        self._seen, self._next = [], 0
        self._prefetch()

    def end_pass(self) -> None:
        """It is over."""
        self._order = self._seen or self._order
        self._next = 0
        self._prefetch()

    def reach(self, choice: Choice) -> None:
        """The modules of a choice are the next ones that are used."""
        self._seen.append(choice)
        self._advance(choice)

    def choose(self, units: Sequence[Unit]) -> None:
        """Read these before all others: they are used next, in this order."""
        self._chosen = list(units)
        self._prefetch()

    def acquire(self, unit: Unit) -> Tensor | None:
        """The bytes of a module, uint8, when they are there; None where it is in use already."""
        found = self._loaded.get(unit)
        if found is None:
            found = self._loaded[unit] = self._read(unit, self._room_for(unit))
        memory = None
        if not found.uses:
            started = time.perf_counter()
            for pending in found.pending:
                pending.wait()
            self.stall += time.perf_counter() - started
            found.pending = []
            memory = self.memory[found.region.first : found.region.end]
            if unit.expert is None:
                self._seen.append(unit)
                self._advance(unit)
            elif unit in self._chosen:
                self._chosen.remove(unit)
        found.uses += 1
        self._prefetch()
        return memory

    def release(self, unit: Unit) -> bool:
        """An end of its use; whether it is the last one, after which its bytes are gone."""
        found = self._loaded.get(unit)
        if found is None or not found.uses:
            return False
        found.uses -= 1
        if found.uses:
            return False
        self._drop(unit)
        self._prefetch()
        return True

    def settle(self) -> None:
        """Wait for all reads and let go of what was read."""
        for unit in list(self._loaded):
            self._drop(unit)

    def _advance(self, one: Unit | Choice) -> None:
        """The place in the order behind this use of a module."""
        count = len(self._order)
        for ahead in range(count):
            place = (self._next + ahead) % count
            if self._order[place] is one:
                self._next = (place + 1) % count
                return

    def _prefetch(self) -> None:
        """Begin to read the next modules, as far as there is room."""
        if not all(map(self._begin, self._chosen)):
            return
        count, spare = len(self._order), 0
        for ahead in range(count):
            one = self._order[(self._next + ahead) % count]
            if isinstance(one, Choice):
                spare = max(spare, one.room)
            elif not self._begin(one, spare):
                return

    def _begin(self, unit: Unit, spare: int = 0) -> bool:
        """Begin to read a module unless it was; whether there was room, and `spare` bytes are left."""
        if unit in self._loaded:
            return True
        region = self._buffer.take(unit.bytes, spare)
        if region is not None:
            self._loaded[unit] = self._read(unit, region)
        return region is not None

    def _read(self, unit: Unit, region: Run) -> _Loaded:
        return _Loaded(region, self._tiers.begin_read(unit, self.memory[region.first : region.end]))

    def _room_for(self, unit: Unit) -> Run:
        """Free a buffer for a module that was not predicted, in place of one that was read for later."""
        while (region := self._buffer.take(unit.bytes)) is None:
            idle = next((other for other in reversed(self._loaded) if not self._loaded[other].uses), None)
            if idle is None:
                raise UnsupportedModelError(
                    f"{unit.name} computes inside of another module whose weights are streamed, and the buffer has no "
                    "room for both; raise memory.device"
                )
            self._drop(idle)
        return region

    def _drop(self, unit: Unit) -> None:
        found = self._loaded.pop(unit)
        for pending in found.pending:
            pending.wait()
        self._buffer.give(found.region)


class _Loaded:
    """A module whose bytes are in the buffer, or on their way."""

    def __init__(self, region: Run, pending: list[Pending]) -> None:
        self.region, self.pending, self.uses = region, pending, 0


class StreamBuffer:
    """Which bytes of `size` are in use: regions that live for one use, taken alternately from both ends.

    Of modules that are used one after the other, each is placed at the lowest gap or at the highest in turn. With room
    for any two neighbours, the one that computes and the one that is read always fit, however their sizes vary.
    """

    def __init__(self, size: int) -> None:
        self._bytes = RunAllocator(size // ALIGN * ALIGN)
        self._high = False

    def take(self, count: int, spare: int = 0) -> Run | None:
        """A region of `count` bytes, a multiple of `ALIGN`; None where no gap has as many, or where none of `spare`
        bytes is left then."""
        found = self._bytes.allocate_run(count, high=self._high)
        if found is None:
            return None
        if self._bytes.longest < spare:
            self.give(found)
            return None
        self._high = not self._high
        return found

    def give(self, region: Run) -> None:
        """Give a region back."""
        self._bytes.release([region])
