"""Lease of a part of shared memory among the processes of a machine.

The pool is a folder in a memory file system, in a folder of this user that nobody else may enter: where anybody may
write, somebody else could have made the pool first, or keep it locked. A lease is a file in it: as large as the lease,
locked by its holder, mapped by nobody else. So the folder is the ledger: nothing that could disagree with what is
taken, and nothing to mend when a process dies, whose lock the kernel lets go. Each change is made alone in the folder:

    Σ bytes of the files ≤ capacity

`multiprocessing.shared_memory` is not used: its resource tracker removes segments that others still use.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import weakref
from pathlib import Path

import torch

from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import locks
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted import own_folder

_CAPACITY = "capacity"
OWN = f"hyper-parallel-{os.geteuid()}"
"""The folder of this user, which has all the pools; it stays when the last one has gone."""
PREFIX = "pool-"
"""Begins the names of pools' folders."""


class Lease:
    """This process's part of a pool; empty at first. It ends with `close`, or with the process."""

    def __init__(self, folder: Path, capacity: int, holder: str) -> None:
        """`holder`: a word for messages to others. Raises TierError where the pool has another capacity."""
        self.folder, self.capacity = folder, capacity
        self.tensor = torch.empty(0, dtype=torch.uint8)
        """uint8 [bytes]"""
        self._path = folder / f"lease-{os.getpid()}-{secrets.token_hex(4)}-{holder}"
        try:
            own_folder(folder.parent)
            _sweep(folder)
            with locks.alone(folder):
                _reclaim(folder)
                _agree(folder, capacity)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._lock = locks.hold(self._path)
        except OSError as error:
            raise TierError(
                f"the pool {folder} cannot be opened ({error.strerror}); a pool needs a file system in memory that "
                "this user may write: mount one there, or leave memory.pool out"
            ) from error
        self._end = weakref.finalize(self, _leave, os.getpid(), folder, self._path, self._file, self._lock)

    def resize(self, count: int) -> None:
        """Have `count` bytes, the first of them as they are. Raises TierError, and says who holds what, if too few are
        free."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        there = os.fstat(self._file).st_size
        try:
            with locks.alone(self.folder):
                _reclaim(self.folder)
                taken = {name: size for name, size in held(self.folder).items() if name != self._path.name}
                if sum(taken.values()) + count > self.capacity:
                    raise TierError(
                        f"{format_bytes(count)} are needed of the pool {self.folder}, and "
                        f"{format_bytes(self.capacity - sum(taken.values()))} of {format_bytes(self.capacity)} are "
                        f"free: {_who(taken)}; set memory.pool higher, or memory.device, so that less goes there"
                    )
                if count > there:
                    self._take(there, count)
                else:
                    os.ftruncate(self._file, count)
                    there = count
        except OSError as error:
            raise TierError(f"the pool {self.folder} cannot be used ({error.strerror})") from error
        finally:
            self._show(max(there, os.fstat(self._file).st_size))

    def close(self) -> None:
        """Give the lease back; the last one to leave removes the pool."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._end()

    def _take(self, there: int, count: int) -> None:
        try:
            os.posix_fallocate(self._file, there, count - there)
        except OSError as error:
            os.ftruncate(self._file, there)
            raise TierError(
                f"{self.folder} has {format_bytes(shutil.disk_usage(self.folder).free)} free, and the lease needs "
                f"{format_bytes(count - there)} more ({error.strerror}); enlarge that file system (mount -o "
                "remount,size=…), or set memory.pool lower"
            ) from error

    def _show(self, count: int) -> None:
        if count:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # page tables are filled now
            self.tensor = torch.frombuffer(mmap.mmap(self._file, count, flags=flags), dtype=torch.uint8)


def held(folder: Path) -> dict[str, int]:
    """Name of each lease to its bytes."""
    return {path.name: path.stat().st_size for path in sorted(folder.glob("lease-*"))}


def _who(taken: dict[str, int]) -> str:
    words = []
    for name, size in taken.items():
        _, process, _, holder = name.split("-", 3)
        words.append(f"{holder} (process {process}) holds {format_bytes(size)}")
    return ", ".join(words) or "nobody else holds any"


def _reclaim(folder: Path) -> None:
    """Remove the leases of processes that have ended."""
    for path in folder.glob("lease-*"):
        if not locks.is_held(path):
            path.unlink()


def _sweep(folder: Path) -> None:
    """Remove this user's other pools whose processes have all been killed, since nothing else would remove them."""
    for other in folder.parent.glob(f"{PREFIX}*"):
        if other != folder:
            with contextlib.suppress(OSError), locks.alone(other):
                _remove_if_left(other)


def _remove_if_left(folder: Path) -> None:
    _reclaim(folder)
    if not held(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _agree(folder: Path, capacity: int) -> None:
    """Write the capacity of an empty pool; raises TierError if a pool in use has another one."""
    note = folder / _CAPACITY
    if held(folder) and note.exists():
        text = note.read_text()
        if text != str(capacity):
            there = format_bytes(int(text)) if text.isdecimal() else "a size that cannot be read"
            raise TierError(
                f"the pool {folder} has {there}, and this process expects "
                f"{format_bytes(capacity)}; give all of them the same memory.pool"
            )
        return
    note.write_text(str(capacity))


def _leave(process: int, folder: Path, path: Path, file: int, lock: int) -> None:
    if os.getpid() != process:
        return  # a fork of the holder is not the holder
    with locks.alone(folder):
        path.unlink(missing_ok=True)
        os.close(file)
        os.close(lock)
        _remove_if_left(folder)
