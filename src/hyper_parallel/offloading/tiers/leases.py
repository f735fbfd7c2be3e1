"""Leases: spill folders, and parts of a shared pool, that belong to a process while it lives.

A process is alive while its file lock is held, which the kernel releases when it ends (flock(2)). Its number would say
less: numbers are used again, and differ between containers that share a folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from hyper_parallel.errors import TierError
from hyper_parallel.proc import try_lock
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import not_ours, own_folder

PATIENCE_S = 60.0
"""How long `alone` waits. Who holds it works for milliseconds; one that does not let go is stopped, or means ill."""


def _opened(path: Path) -> int:
    """Open a file or folder on a new descriptor, to which flock ties a lock; no link is followed, no pipe blocks."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def hold(path: Path) -> int:
    """Lock a file or folder that nobody else has locked; the descriptor to close in order to let it go.

    Raises BlockingIOError if somebody has. On a file system without locks it holds nothing, and `is_held` is true.
    """
    descriptor = _opened(path)
    try:
        if _try_lock(descriptor) is False:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Whether a process that lives has locked it, or nothing can tell; what is gone is not held."""
    try:
        descriptor = _opened(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or nothing of ours
    try:
        return not _try_lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process is in `alone` of this folder. Makes the folder where it is missing.

    Raises OSError where somebody else keeps it locked.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _opened(folder)
        except FileNotFoundError:
            continue
        try:
            _wait_for(descriptor)
            if _is_at(descriptor, folder):
                yield
                return
            # Somebody removed the folder while this process waited for it.
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """As `try_lock`. NFS has no lock for a folder, which is open for reading only."""
    try:
        return try_lock(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def _wait_for(descriptor: int) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, 0.0005
    while _try_lock(descriptor) is False:
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"another process has kept its lock for {PATIENCE_S:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


# Spill folder of a tier: locked while its process lives, removed afterwards.
#
#     FOLDER/hyper-parallel-spill-<process>-<random>/slots-1
#
# The files could be removed as soon as they are open, and the system would free them with the process. They are not: a
# person who looks at a full disk sees what fills it. So the folder is removed when the tier is closed, at the process's
# exit, or, after a SIGKILL, by the next tier that opens FOLDER, which knows by the lock that nobody uses it any more.
# It gets this name when it is locked already; FOLDER itself, in which others may write too, is never locked.

log = logging.getLogger(__name__)

_OURS = re.compile(r"hyper-parallel-spill-[0-9]+-[0-9a-f]{8}(\.new)?")
_NEW_S = 60.0
"""After which a folder that was never locked is one that its process did not live to lock."""


class Spill:
    """A folder of this process's own in `parent`."""

    def __init__(self, parent: Path) -> None:
        """Removes what processes left in `parent` that have ended. Raises TierError if it cannot be written."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _sweep_spills(parent)
            self.path = parent / f"hyper-parallel-spill-{os.getpid()}-{secrets.token_hex(4)}"
            new = self.path.with_name(f"{self.path.name}.new")
            new.mkdir(mode=0o700)
            lock = hold(new)
            new.rename(self.path)
        except OSError as error:
            raise TierError(
                f"no folder can be made in {parent} ({error.strerror}); set memory.flash to one that this user may "
                "write"
            ) from error
        self._end = weakref.finalize(self, _remove, os.getpid(), self.path, lock)

    def close(self) -> None:
        """Remove it; calls after the first do nothing."""
        self._end()


def _sweep_spills(parent: Path) -> None:
    for path in sorted(parent.iterdir()):
        if not (ours := _OURS.fullmatch(path.name)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another one sweeps, too
            if not_ours(path) is not None:
                continue
            if ours[1] and time.time() - path.lstat().st_mtime < _NEW_S:
                continue  # before its lock is tried, which its process is about to take
            if is_held(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s, which a process that has ended had left", path)


def _remove(process: int, path: Path, lock: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process is not the process
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


# Lease of a part of shared memory among the processes of a machine.
#
# The pool is a folder in a memory file system, in a folder of this user that nobody else may enter: where anybody may
# write, somebody else could have made the pool first, or keep it locked. A lease is a file in it: as large as the
# lease, locked by its holder, mapped by nobody else. So the folder is the ledger: nothing that could disagree with what
# is taken, and nothing to mend when a process dies, whose lock the kernel lets go. Each change is made alone in the
# folder:
#
#     Σ bytes of the files ≤ capacity
#
# `multiprocessing.shared_memory` is not used: its resource tracker removes segments that others still use.

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
            _sweep_pools(folder)
            with alone(folder):
                _reclaim(folder)
                _agree(folder, capacity)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._lock = hold(self._path)
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
            with alone(self.folder):
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
        if not is_held(path):
            path.unlink()


def _sweep_pools(folder: Path) -> None:
    """Remove this user's other pools whose processes have all been killed, since nothing else would remove them."""
    for other in folder.parent.glob(f"{PREFIX}*"):
        if other != folder:
            with contextlib.suppress(OSError), alone(other):
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
    with alone(folder):
        path.unlink(missing_ok=True)
        os.close(file)
        os.close(lock)
        _remove_if_left(folder)
