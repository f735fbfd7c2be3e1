"""Base of tiers in memory that the device copies to and from directly.

A copy runs on one of two streams, one out and one back. On an accelerator both run beside the compute stream; on the
CPU each is a thread. Host computations on this memory run in a separate thread on any device, and so does every copy
that has to wait for one, so that the caller never waits.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.compat.cpu_streams import CpuStream
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers.closing import Closing
from hyper_parallel.offloading.tiers.copies import Copy, UnderWay
from hyper_parallel.offloading.tiers.relocate import Shift, ordered
from hyper_parallel.offloading.tiers.slots import SlotPlacement, Slots, lay
from hyper_parallel.offloading.tiers.tier import TIME_LIMIT
from hyper_parallel.units import format_bytes


class MemoryTier(Closing):
    """A `Tier`; a subclass says where its memory comes from (`_resize`, `_release`) and shows it (`_memory`)."""

    name: str
    align = 64

    def __init__(self, backend: Backend, capacity: int, time_limit: float = TIME_LIMIT) -> None:
        self.capacity = capacity
        self._backend = backend
        self._limit = time_limit
        self._slots = Slots(self.name)
        self._under_way = UnderWay()
        self._out, self._back = backend.Stream(), backend.Stream()
        self._hand = CpuStream()

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        """As `Tier`. What moves within the memory is copied in place."""
        self._check_open()
        places = lay(self.name, sizes, offsets, self.align)
        wanted = self._slots.replaced(places)
        if wanted.end > self.capacity:
            raise TierError(
                f"{format_bytes(wanted.end)} are needed in the {self.name} tier ({len(sizes)} slots), and it may hold "
                f"{format_bytes(self.capacity)}; set memory.{self.name} to at least {wanted.end}, or raise "
                "memory.device, so that less goes there"
            )
        self._under_way.settle()
        before = self._slots
        if wanted.end > self._memory.numel():
            self._resize(wanted.end)
        self._move(
            [Shift(copy.first, places[slot].first, copy.bytes) for slot, copy in wanted.written.items()]
        )
        for slot, copy in wanted.written.items():
            copy.first = places[slot].first
        self._slots = wanted
        if wanted.end < before.end:
            self._resize(wanted.end)

    def begin_write(self, slot: int, x: torch.Tensor) -> Copy:
        """As `Tier`."""
        self._check_open()
        place = self._slots.for_write(slot, x)
        copy = self._begin(f"writing slot {slot} of the {self.name} tier", x, place, [(place, x)])
        self._slots.written[slot] = copy
        return copy

    def begin_read(self, slot: int, x: torch.Tensor) -> Copy:
        """As `Tier`."""
        self._check_open()
        place, source = self._slots.for_read(slot, x)
        return self._begin(f"reading slot {slot} of the {self.name} tier", x, place, [(place, x)], [source])

    def begin_reads(self, slots: Sequence[int], x: torch.Tensor) -> Copy:
        """As `batched_reads.begin_reads`: one after the other, and over together."""
        self._check_open()
        found = [self._slots.for_read(slot, part) for slot, part in zip(slots, x, strict=True)]
        places = [place for place, _ in found]
        # Of all between the first and the last, so that a write to any of them waits.
        around = SlotPlacement(min(one.first for one in places), max(one.last for one in places))
        what = f"reading slots {', '.join(map(str, slots))} of the {self.name} tier"
        return self._begin(what, x, around, list(zip(places, x, strict=True)), [one for _, one in found])

    def begin_work(
        self, what: str, slots: Sequence[int], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> Copy:
        """As `Workplace`."""
        self._check_open()
        copies: list[Copy] = []
        before: list[Copy] = []
        places: list[SlotPlacement] = []
        for slot in slots:
            place, source = self._slots.for_work(slot)
            copy = Copy(what, place.first, self._memory[place.first : place.last], self._limit, self._backend)
            copy.by_host = True
            before += [source, *self._under_way.add(copy)]
            self._slots.written[slot] = copy
            copies.append(copy)
            places.append(place)

        def run() -> None:
            failure: BaseException | None = None
            try:
                for other in before:
                    other.block()
                work([self._memory[place.first : place.last] for place in places])
            except BaseException as error:
                failure = error
            for copy in copies:
                copy.finish(failure)

        self._hand.run(run)
        return copies[-1]

    def in_place(self, slot: int) -> torch.Tensor:
        """As `Workplace`."""
        self._check_open()
        place, source = self._slots.for_work(slot)
        source.block()
        return self._memory[place.first : place.last]

    def _give_back(self) -> None:
        # A device that failed must not keep memory from being given back.
        with contextlib.suppress(Exception):
            self._under_way.settle()
        self._slots = Slots(self.name)
        self._release()

    @property
    @abstractmethod
    def _memory(self) -> torch.Tensor:
        """All there is, uint8."""

    @abstractmethod
    def _resize(self, count: int) -> None:
        """Resize to `count` bytes and keep the first ones. Raises TierError and changes nothing on failure."""

    @abstractmethod
    def _release(self) -> None:
        """Give everything back."""

    def _begin(
        self,
        what: str,
        x: torch.Tensor,
        around: SlotPlacement,
        parts: list[tuple[SlotPlacement, torch.Tensor]],
        sources: Sequence[Copy] = (),
    ) -> Copy:
        """Out, or from what `sources` have put there back. `x`: all of the `parts` on the device; `around`: all of
        their places."""
        copy = Copy(what, around.first, x, self._limit, self._backend, around.bytes)
        before = [*self._under_way.add(copy), *sources]  # a source is over or not: if it failed, so does this

        def work() -> None:
            # Here the current stream is the copy's, so that these make it wait, and on the CPU its thread.
            copy.ready.wait()
            for other in before:
                other.hold()
            copy.begin()
            while parts:  # none is held when the copy is said to be over
                place, part = parts.pop()
                there = self._memory[place.first : place.last]
                if sources:
                    self._backend.copy_bytes(part, there)
                else:
                    self._backend.copy_bytes(there, part)

        stream = self._back if sources else self._out
        if any(other.by_host and not other.done() for other in before):
            copy.by_host = True
            self._hand.run(lambda: stream.run(lambda: copy.attempt(work)))
        else:
            stream.run(lambda: copy.attempt(work))
        return copy

    def _move(self, shifts: list[Shift]) -> None:
        base = self._memory.data_ptr()
        aside: dict[int, bytes] = {}
        for step, shift in ordered(shifts):
            if step == "copy":
                ctypes.memmove(base + shift.target, base + shift.source, shift.bytes)
            elif step == "aside":
                aside[shift.source] = ctypes.string_at(base + shift.source, shift.bytes)
            else:
                ctypes.memmove(base + shift.target, aside.pop(shift.source), shift.bytes)
