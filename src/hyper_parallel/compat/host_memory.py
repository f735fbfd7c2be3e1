"""Memory of the host: pinned for copies to and from the device, and given back to the system.

Pinned memory has its exact size, is allocated once and freed on `close`. PyTorch's own comes in powers of two and is
kept after it is freed, so that an arena of 33 GiB would take 64. Where the device's runtime can lock the pages of a
mapping (`Backend.pin`), the mapping is ours. `return_freed_memory` is for all other memory of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Protocol

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from glibc's malloc.h."""

Unpin = Callable[[], None]
Pin = Callable[[torch.Tensor], Unpin]


def return_freed_memory(least: int) -> None:
    """From now on the C library gives freed blocks of at least `least` bytes back to the system at once. No effect
    without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, least)
        library.mallopt(_M_TRIM_THRESHOLD, least)


class HostMemory(Protocol):
    """Bytes of the host."""

    tensor: torch.Tensor
    """uint8 [bytes], the first one at the beginning of a page."""

    def resize(self, count: int) -> None:
        """Have `count` bytes, the first of them as they are. No view of `tensor` may be alive. Raises OSError."""

    def close(self) -> None:
        """Give everything back, once."""


class HostPages:
    """A private mapping. Each page is touched at once, so that no later write waits for the system to find one."""

    def __init__(self, count: int, pin: Pin) -> None:
        """Raises OSError where the system has no such memory, or a limit forbids it."""
        self._pin = pin
        self._unpin: Unpin = _nothing
        self._pages: mmap.mmap | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.resize(count)

    def resize(self, count: int) -> None:
        """As `HostMemory`. Pages move without being copied, so that never more than `count` bytes are taken."""
        there = self.tensor.numel()
        size = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        if count == there:
            return
        if count == 0:
            self.close()
            return
        self._unpin()
        self._unpin = _nothing
        self.tensor = torch.empty(0, dtype=torch.uint8)
        try:
            if self._pages is None:
                # Shared, which is the default of `mmap`, evades limits on a process's memory.
                self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            elif size != len(self._pages):
                self._pages.resize(size)
        except OSError:
            self._show(there)
            raise
        with contextlib.suppress(OSError, AttributeError):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._show(count)
        if count > there:
            self.tensor[there :: mmap.PAGESIZE] = 0
            self.tensor[-1:] = 0

    def close(self) -> None:
        """As `HostMemory`; also where a view is alive, which reads zeros from then on."""
        self._unpin()
        self._unpin = _nothing
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
            self._pages = None

    def _show(self, count: int) -> None:
        if self._pages is not None and count:
            self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8, count=count)
            self._unpin = self._pin(self.tensor)


class TorchPages:
    """Pinned memory of PyTorch's, for a device whose runtime does not lock pages that others made."""

    def __init__(self, count: int) -> None:
        """Raises OSError where there is no such memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.resize(count)

    def resize(self, count: int) -> None:
        """As `HostMemory`; while it grows, the old bytes and the new ones are both there."""
        if count == self.tensor.numel():
            return
        try:
            fresh = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OSError(f"no {count} bytes of pinned memory: {error}") from error
        kept = min(count, self.tensor.numel())
        fresh[:kept] = self.tensor[:kept]
        self.tensor = fresh

    def close(self) -> None:
        """As `HostMemory`."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _nothing() -> None:
    pass
