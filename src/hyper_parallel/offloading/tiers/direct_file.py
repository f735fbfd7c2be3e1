"""Direct I/O files (open(2), O_DIRECT): reads and writes that bypass the page cache.

Offsets, lengths and addresses are multiples of `BLOCK`. Where the file system refuses, it is read and written through
the cache, and the log says so.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import weakref
from pathlib import Path

import torch

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
