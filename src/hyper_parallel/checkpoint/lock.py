"""One writer per folder: a lock that the kernel releases when its process ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hyper_parallel.checkpoint import folder_names
from hyper_parallel.checkpoint.durable import discard
from hyper_parallel.errors import CheckpointError
from hyper_parallel.untrusted import open_lock

LOCK = ".writer.lock"


def open_folder(folder: Path) -> int | None:
    """Create the folder, take its lock, and remove what interrupted writers left; returns the lock's file descriptor.

    None on a file system without locks: nothing is removed there, since files of dead and live writers look alike.
    Raises CheckpointError if another run holds the lock, OSError if the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_lock(folder / LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder_names.stale(folder):
            discard(path)
    except BlockingIOError as error:
        os.close(lock)
        raise CheckpointError(
            f"another run is writing checkpoints into {folder}; wait for it, or give this run another 'out'"
        ) from error
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return lock
