"""File I/O of the flash tier: direct I/O (open(2), O_DIRECT), checksums, threads with bounce buffers.

Offsets, lengths and addresses are multiples of `BLOCK`. Where the file system refuses direct I/O, it is read and
written through the cache, and the log says so.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from hyper_parallel.compat import Backend, Stream, cpu
from hyper_parallel.compat.host_memory import HostMemory
from hyper_parallel.errors import FaultError, TierError
from hyper_parallel.units import format_bytes

log = logging.getLogger(__name__)

BLOCK = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_refused: set[int] = set()
"""Device numbers of the file systems without direct I/O that were already logged."""


class DirectFile:
    """A new file. Several threads may read and write at once."""

    def __init__(self, path: Path) -> None:
        """Raises TierError where it cannot be made."""
        self.path = path
        self.direct = True
        self.size = 0
        """Bytes that are the file's for sure."""
        try:
            self._file = self._open()
        except OSError as error:
            raise TierError(
                f"{path} cannot be written ({error.strerror}); set memory.flash to a folder on a disk that can"
            ) from error
        self._end = weakref.finalize(self, os.close, self._file)

    def allocate(self, count: int) -> None:
        """Have room for `count` bytes. Raises TierError, and is as large as before, if the disk has not as much."""
        more, free = count - self.size, shutil.disk_usage(self.path.parent).free
        try:
            if more > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if more > 0:
                os.posix_fallocate(self._file, self.size, more)
            else:
                os.ftruncate(self._file, count)
        except OSError as error:
            os.ftruncate(self._file, self.size)
            raise TierError(
                f"{format_bytes(more)} more are needed in {self.path.parent.parent}, and {format_bytes(free)} are free "
                f"there ({error.strerror}); make room, set memory.flash to a folder on a larger disk, or raise "
                "memory.host or memory.device"
            ) from error
        self.size = count

    def write(self, part: torch.Tensor, at: int) -> None:
        """Write uint8 [n] of the host at an offset. Raises TierError."""
        view = part.numpy().data
        done = 0
        while done < len(view):
            try:
                done += os.pwritev(self._file, [view[done:]], at + done)
            except OSError as error:
                if error.errno not in _FULL:
                    raise FaultError(
                        f"{self.path} could not be written at {at + done}: {error.strerror}"
                    ) from error
                free = shutil.disk_usage(self.path.parent).free
                raise TierError(
                    f"the disk of {self.path} ran full at {at + done} ({error.strerror}), with {format_bytes(free)} "
                    "free now; make room, or set memory.flash to a folder on a larger disk"
                ) from error

    def read(self, part: torch.Tensor, at: int) -> None:
        """Fill uint8 [n] of the host from an offset. Raises TierError, also where the file ends too early."""
        view = part.numpy().data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file, [view[done:]], at + done)
            except OSError as error:
                raise FaultError(f"{self.path} could not be read at {at + done}: {error.strerror}") from error
            if not count:
                raise FaultError(
                    f"{self.path} ends at {at + done}: somebody made it shorter while it was in use"
                )
            done += count

    def close(self) -> None:
        """Let go of it; the file stays. Calls after the first do nothing."""
        self._end()

    def remove(self) -> None:
        """Let go of it, and of its bytes."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", None)
        if direct is not None:
            try:
                return os.open(self.path, flags | direct, 0o600)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.path.unlink(missing_ok=True)  # made, and then refused
        self.direct = False
        device = self.path.parent.stat().st_dev
        if device not in _refused:
            _refused.add(device)
            log.warning(
                "%s does not support direct I/O: what is written there also fills the system's cache, and rates are "
                "those of the cache",
                self.path.parent.parent,
            )
        return os.open(self.path, flags, 0o600)


# Checksums of data on flash.
#
# A part is rows of blocks of 4 KiB, each block 1,024 words of 32 bits, x[row, lane]. With fixed odd weights w,
#
#     sum[lane] = Σ_row w[row] · x[row, lane]  mod 2³²            checksum = crc32 of the 1,024 sums
#
# An odd number has an inverse mod 2³², so that an error within one block changes the sums wherever it changes a word,
# and is missed with the odds of a CRC, 2⁻³²; so is, the weights being random, an error in several blocks (a stale, a
# misplaced, a torn one), but for one that in the same lanes of two blocks changes nothing other than the highest bits.
# CRC-32 alone (`zlib`) would miss nothing of that kind; it takes several times as long as this, whose speed
# `benchmarks/tiers.py` measures, and so a good part of what a fast disk takes.

_LANES = BLOCK // 4
_draw = random.Random(0)
_WEIGHTS = np.array([_draw.getrandbits(32) | 1 for _ in range(1024)], dtype=np.uint32)
MOST = BLOCK * len(_WEIGHTS)
"""Bytes of the largest part."""


def checksum(part: torch.Tensor) -> int:
    """The checksum of uint8 [n] on the host, n a multiple of `BLOCK` and at most `MOST`."""
    assert part.numel() in range(0, MOST + 1, BLOCK), part.shape
    blocks = part.numpy().view(np.uint32).reshape(-1, _LANES)
    return zlib.crc32(np.einsum("r,rl->l", _WEIGHTS[: len(blocks)], blocks))


# I/O threads between a device and a file, each with a bounce buffer.
#
# While one lane waits for the disk, another copies to or from the device. Parts begin in the order in which they were
# given; with several lanes one may end before an earlier one.

Job = Callable[[torch.Tensor, Stream], None]
"""Carries one part, given a page-aligned buffer, uint8 [bytes], and a stream for the device's side. Raises nothing."""

_STACK = 2**20
"""Bytes of a lane's stack, which counts against limits on a process's memory; the usual 8 MiB exceed its buffer."""


class Lanes:
    """`count` lanes with buffers of `size` bytes."""

    def __init__(self, backend: Backend, count: int, size: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended, self._lock = 0.0, threading.Lock()
        """When the last thing that was carried as a whole was over."""
        self._end = weakref.finalize(self, _stop, self._jobs, count)
        self._end.atexit = False  # then they are abandoned
        self._ending = threading.Event()
        abandon = partial(_abandon, self._jobs, count, self._ending)
        self._threads = [
            cpu.start_thread(
                partial(_serve, self._jobs, backend.host_pages(size), backend.OwnStream()),
                "tier-lane",
                abandon,
                _STACK,
            )
            for _ in range(count)
        ]

    def put(self, job: Job) -> None:
        """Carry a part after those given before."""
        self._jobs.put(job)

    @property
    def ending(self) -> bool:
        """Whether the process ends: a job that has not begun should do nothing but say so."""
        return self._ending.is_set()

    def ended(self, began: float) -> float:
        """Note that what began then is over now; the seconds in which the lanes were its own. The next thing begins on
        one lane while this one ends on another: from then on to the end they are still this one's."""
        with self._lock:
            now = time.perf_counter()
            since, self._ended = max(began, self._ended), now
        return now - since

    def close(self, limit: float) -> None:
        """End the threads after what they were given; waits for them, `limit` seconds at most."""
        self._end()
        until = time.monotonic() + limit
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))


def _serve(jobs: SimpleQueue[Job | None], buffer: HostMemory, stream: Stream) -> None:
    while (job := jobs.get()) is not None:
        job(buffer.tensor, stream)
        del job  # it must not keep its tensor alive until the next one comes
    buffer.close()


def _stop(jobs: SimpleQueue[Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _abandon(jobs: SimpleQueue[Job | None], count: int, ending: threading.Event) -> None:
    ending.set()
    _stop(jobs, count)
