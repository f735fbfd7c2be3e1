"""Flash tier: files on an SSD.

A copy is cut into parts of 2 MiB, which lanes carry: device → buffer → disk, or back. Each part's checksum stays in
this process's memory, so that a part of an earlier write that comes back is found as surely as a flipped bit.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hyper_parallel.compat import Backend, Stream
from hyper_parallel.errors import FaultError, TierError
from hyper_parallel.offloading.tiers.file_io import BLOCK, DirectFile, Job, Lanes, checksum
from hyper_parallel.offloading.tiers.leases import Spill
from hyper_parallel.offloading.tiers.slots import Copy, SlotPlacement, Slots, UnderWay, lay
from hyper_parallel.offloading.tiers.tier import TIME_LIMIT, Closing
from hyper_parallel.units import format_bytes

PART = 2 * 2**20
LANES = 3
"""In each direction at most. A lane computes checksums, and on a processor it copies: where the compute's threads have
all cores, each further lane takes a core from a team that then waits for its slowest thread."""
_Carry = Callable[[torch.Tensor, Stream, int, SlotPlacement], None]
"""Carries a part of a copy, given a buffer, a stream, and the part's index and place in the copy."""


class FlashTier(Closing):
    """A `Tier` of one file."""

    name = "flash"
    align = BLOCK

    def __init__(
        self,
        folder: str | Path,
        backend: Backend,
        capacity: int | None = None,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        """`folder` is made where it is missing. `capacity`: bytes; left out, what its disk has free now.

        Raises TierError if the folder cannot be written.
        """
        self._spill = Spill(Path(folder))
        self.capacity = shutil.disk_usage(self._spill.path).free if capacity is None else capacity
        self._backend = backend
        self._limit = time_limit
        self._slots = Slots(self.name)
        self._under_way = UnderWay()
        self._generation = 0
        self._file = self._fresh()
        lanes = max(1, min(LANES, backend.spare_cores() // 2))
        self._out, self._back = Lanes(backend, lanes, PART), Lanes(backend, lanes, PART)

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        """As `Tier`. If something moves that stays, the old file and the new one are there together for a while."""
        self._check_open()
        places = lay(self.name, sizes, offsets, self.align)
        wanted = self._slots.replaced(places)
        end = _whole(wanted.end)
        if end > self.capacity:
            raise TierError(
                f"{format_bytes(end)} are needed in the flash tier ({len(sizes)} slots), and it may hold "
                f"{format_bytes(self.capacity)}; make room on the disk of {self._spill.path.parent}, set memory.flash "
                "to a folder on a larger one, or raise memory.host or memory.device"
            )
        self._under_way.settle()
        if all(copy.first == places[slot].first for slot, copy in wanted.written.items()):
            self._file.allocate(end)
        else:
            self._rewrite(wanted, end)
        self._slots = wanted

    def begin_write(self, slot: int, x: torch.Tensor) -> Copy:
        self._check_open()
        place = self._slots.for_write(slot, x)
        copy = Copy(f"writing slot {slot} of the flash tier", place.first, x, self._limit, self._backend)
        copy.sums = [0] * len(_parts(place.bytes))
        file, move = self._file, self._backend.copy_bytes

        def carry(buffer: torch.Tensor, stream: Stream, index: int, part: SlotPlacement) -> None:
            padded = buffer[: _whole(part.bytes)]
            stream.run(lambda: move(padded[: part.bytes], x[part.first : part.last]))
            padded[part.bytes :] = 0
            stream.synchronize()
            copy.sums[index] = checksum(padded)
            file.write(padded, place.first + part.first)

        self._begin(copy, self._out, carry)
        self._slots.written[slot] = copy
        return copy

    def begin_read(self, slot: int, x: torch.Tensor) -> Copy:
        self._check_open()
        place, source = self._slots.for_read(slot, x)
        copy = Copy(f"reading slot {slot} of the flash tier", place.first, x, self._limit, self._backend)
        file, move = self._file, self._backend.copy_bytes

        def carry(buffer: torch.Tensor, stream: Stream, index: int, part: SlotPlacement) -> None:
            padded, at = buffer[: _whole(part.bytes)], place.first + part.first
            _checked(file, padded, at, slot, source.sums[index])
            stream.run(lambda: move(x[part.first : part.last], padded[: part.bytes]))
            stream.synchronize()

        self._begin(copy, self._back, carry, source)
        return copy

    def _give_back(self) -> None:
        for lanes in (self._out, self._back):
            lanes.close(self._limit)
        with contextlib.suppress(TierError):
            self._under_way.settle()
        self._file.close()
        self._spill.close()

    def _begin(self, copy: Copy, lanes: Lanes, carry: _Carry, source: Copy | None = None) -> None:
        before = self._under_way.add(copy)
        if source is not None:
            before.append(source)  # over or not: if it failed, so does this
        parts = _parts(copy.bytes)
        if not parts:
            copy.finish()
        left, failures, lock = [len(parts)], list[BaseException](), threading.Lock()
        began: list[float] = []

        def job(index: int, part: SlotPlacement) -> Job:
            def run(buffer: torch.Tensor, stream: Stream) -> None:
                try:
                    if lanes.ending:
                        raise TierError("the process is ending")
                    if not failures:
                        for other in before:
                            other.hold()
                        copy.ready.synchronize()
                        began.append(time.perf_counter())
                        carry(buffer, stream, index, part)
                except BaseException as error:
                    failures.append(error)
                with lock:
                    left[0] -= 1
                    if not left[0] and began:
                        copy.took(lanes.ended(began[0]))
                    if not left[0]:  # only now does no lane use the tensor's memory any more
                        copy.finish(failures[0] if failures else None)

            return run

        for index, part in enumerate(parts):
            lanes.put(job(index, part))

    def _fresh(self) -> DirectFile:
        self._generation += 1
        return DirectFile(self._spill.path / f"slots-{self._generation}")

    def _rewrite(self, wanted: Slots, end: int) -> None:
        """Bring what stays to its new places, by way of a new file: if that fails, the old one is as it was."""
        fresh, old = self._fresh(), self._file
        buffer = self._backend.host_pages(PART)
        try:
            fresh.allocate(end)
            for slot, copy in wanted.written.items():
                copy.hold()
                for index, part in enumerate(_parts(copy.bytes)):
                    padded = buffer.tensor[: _whole(part.bytes)]
                    _checked(old, padded, copy.first + part.first, slot, copy.sums[index])
                    fresh.write(padded, wanted.places[slot].first + part.first)
        except TierError:
            fresh.remove()
            raise
        finally:
            buffer.close()
        for slot, copy in wanted.written.items():
            copy.first = wanted.places[slot].first
        self._file = fresh
        old.remove()


def _checked(file: DirectFile, padded: torch.Tensor, at: int, slot: int, expected: int) -> None:
    """Read a part, and raise FaultError if it is not what was written."""
    file.read(padded, at)
    if checksum(padded) != expected:
        raise FaultError(
            f"{file.path} is damaged: what slot {slot} has at {at} … {at + padded.numel()} is not what was written "
            "there; nothing of it was used. Look at the disk's health and set memory.flash to another one"
        )


def _parts(count: int) -> list[SlotPlacement]:
    return [SlotPlacement(first, min(first + PART, count)) for first in range(0, count, PART)]


def _whole(count: int) -> int:
    """In blocks, rounded up."""
    return -(-count // BLOCK) * BLOCK
