"""File locks that the kernel releases when their process ends (flock(2)).

A process is alive while its lock is held. Its number would say less: numbers are used again, and differ between
containers that share a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 60.0
"""How long `alone` waits. Who holds it works for milliseconds; one that does not let go is stopped, or means ill."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def _opened(path: Path) -> int:
    """Open a file or folder on a new descriptor, to which flock ties a lock; no link is followed, no pipe blocks."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def hold(path: Path) -> int:
    """Lock a file or folder that nobody else has locked; the descriptor to close in order to let it go.

    Raises BlockingIOError if somebody has. On a file system without locks it holds nothing, and `is_held` is true.
    """
    descriptor = _opened(path)
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
        descriptor = _opened(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or nothing of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


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


def _wait_for(descriptor: int) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.ETIMEDOUT, f"another process has kept its lock for {PATIENCE_S:.0f} s"
                ) from None
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return
            raise
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
