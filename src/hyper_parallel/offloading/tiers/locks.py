"""Locks on folders and files that the kernel lets go when their process ends, however it ends (flock(2)).

A process is alive while its lock is held. Its number would say less: numbers are used again, and differ between
containers that share a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def hold(path: Path) -> int:
    """Lock a file or folder that nobody else has locked; the descriptor to close in order to let it go.

    Raises BlockingIOError if somebody has. On a file system without locks it holds nothing, and `is_held` is true.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise
    return descriptor


def is_held(path: Path) -> bool:
    """Whether a process that lives has locked it, or nothing can tell; what is gone is not held."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process is in `alone` of this folder. Makes the folder where it is missing."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            if _is_at(descriptor, folder):
                yield
                return
            # Somebody removed the folder while this process waited for it.
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
