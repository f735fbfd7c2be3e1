"""Tiers in memory that the device copies to and from directly: pinned host memory, and a pool of several processes.

A copy runs on one of two streams, one out and one back. On an accelerator both run beside the compute stream; on the
CPU each is a thread. Host computations on this memory run in a separate thread on any device, and so does every copy
that has to wait for one, so that the caller never waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.compat.cpu import CpuStream
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers.leases import OWN, PREFIX, Lease
from hyper_parallel.offloading.tiers.slots import Copy, Shift, SlotPlacement, Slots, UnderWay, lay, ordered
from hyper_parallel.offloading.tiers.tier import TIME_LIMIT, Closing, Pending, Tier
from hyper_parallel.proc import MEMORY, bytes_in
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
        self._check_open()
        place = self._slots.for_write(slot, x)
        copy = self._begin(f"writing slot {slot} of the {self.name} tier", x, place, [(place, x)])
        self._slots.written[slot] = copy
        return copy

    def begin_read(self, slot: int, x: torch.Tensor) -> Copy:
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


class HostTier(MemoryTier):
    """One buffer, as large as the slots need, taken and touched by `reserve`; locked where the device wants it."""

    name = "host"

    def __init__(self, backend: Backend, capacity: int, time_limit: float = TIME_LIMIT) -> None:
        """`capacity`: bytes that `reserve` may take at most."""
        super().__init__(backend, capacity, time_limit)
        self._pages = backend.host_pages(0)

    @property
    def _memory(self) -> torch.Tensor:
        return self._pages.tensor

    def _resize(self, count: int) -> None:
        more, free = count - self._memory.numel(), bytes_in(MEMORY, "MemAvailable")
        if free is not None and more > free:
            raise TierError(
                f"the host tier needs {format_bytes(more)} of memory, and this machine has {format_bytes(free)} "
                "available; end what else runs here, or set memory.host lower and memory.flash to a folder"
            )
        try:
            self._pages.resize(count)
        except OSError as error:
            raise TierError(
                f"the system refused {format_bytes(more)} of memory for the host tier ({error.strerror or error}): "
                "raise the limit on this process's memory (ulimit -d, ulimit -v), or set memory.host lower and "
                "memory.flash to a folder"
            ) from error

    def _release(self) -> None:
        self._pages.close()


SHARED = Path("/dev/shm")
"""Where the system keeps files in memory."""


class PoolTier(MemoryTier):
    """This process's lease of a pool: on one machine the host's memory, in files of a memory file system."""

    name = "pool"

    def __init__(
        self,
        backend: Backend,
        capacity: int,
        pool: str,
        holder: str = "a process",
        folder: Path = SHARED,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        """`pool`: the same name in all processes that share, and in no others. `capacity`: of all of them together.

        `holder`: what this process is called in the messages of the others. Raises TierError.
        """
        super().__init__(backend, capacity, time_limit)
        where = folder / OWN / (PREFIX + re.sub(r"[^A-Za-z0-9_.]", "_", pool))
        self._lease = Lease(where, capacity, re.sub(r"[^A-Za-z0-9_. ]", "_", holder))
        self._unpin = backend.pin(self._lease.tensor)

    @property
    def _memory(self) -> torch.Tensor:
        return self._lease.tensor

    def _resize(self, count: int) -> None:
        self._unpin()
        try:
            self._lease.resize(count)
        finally:
            self._unpin = self._backend.pin(self._lease.tensor)

    def _release(self) -> None:
        self._unpin()
        self._lease.close()


class _Several:
    """Copies that are waited for together."""

    def __init__(self, copies: Sequence[Pending]) -> None:
        self._copies = copies

    def wait(self) -> float:
        return sum(one.wait() for one in self._copies)

    def done(self) -> bool:
        return all(one.done() for one in self._copies)

    @property
    def seconds(self) -> float | None:
        """As `Pending`: nobody knows, since they run beside one another."""
        return None


def begin_reads(tier: Tier, slots: Sequence[int], x: torch.Tensor) -> Pending:
    """Begin to copy to `x`, uint8 [k, n] on the device, the n bytes that were last written to each of k slots."""
    if isinstance(tier, MemoryTier):
        return tier.begin_reads(slots, x)
    return _Several([tier.begin_read(slot, part) for slot, part in zip(slots, x, strict=True)])
