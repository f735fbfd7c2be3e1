"""Spill folder of a tier: locked while its process lives, removed afterwards.

    FOLDER/hyper-parallel-spill-<process>-<random>/slots-1

The files could be removed as soon as they are open, and the system would free them with the process. They are not: a
person who looks at a full disk sees what fills it. So the folder is removed when the tier is closed, at the process's
exit, or, after a SIGKILL, by the next tier that opens FOLDER, which knows by the lock that nobody uses it any more. It
gets this name when it is locked already; FOLDER itself, in which others may write too, is never locked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
import weakref
from pathlib import Path

from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import locks
from hyper_parallel.untrusted import not_ours

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
            _sweep(parent)
            self.path = parent / f"hyper-parallel-spill-{os.getpid()}-{secrets.token_hex(4)}"
            new = self.path.with_name(f"{self.path.name}.new")
            new.mkdir(mode=0o700)
            lock = locks.hold(new)
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


def _sweep(parent: Path) -> None:
    for path in sorted(parent.iterdir()):
        if not (ours := _OURS.fullmatch(path.name)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another one sweeps, too
            if not_ours(path) is not None:
                continue
            if ours[1] and time.time() - path.lstat().st_mtime < _NEW_S:
                continue  # before its lock is tried, which its process is about to take
            if locks.is_held(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s, which a process that has ended had left", path)


def _remove(process: int, path: Path, lock: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process is not the process
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
