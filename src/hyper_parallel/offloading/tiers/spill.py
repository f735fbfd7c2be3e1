"""The folder of one tier on a disk: locked while its process lives, removed with it.

    FOLDER/hyper-parallel-spill-<process>-<random>/slots-1

The files could be removed as soon as they are open, and the system would free them with the process. They are not: a
person who looks at a full disk sees what fills it. So the folder is removed when the tier is closed, at the process's
exit, or, after a SIGKILL, by the next tier that opens FOLDER, which knows by the lock that nobody uses it any more.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path

from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import locks

log = logging.getLogger(__name__)

_OURS = re.compile(r"hyper-parallel-spill-[0-9]+-[0-9a-f]{8}")


class Spill:
    """A folder of this process's own in `parent`."""

    def __init__(self, parent: Path) -> None:
        """Removes what processes left in `parent` that have ended. Raises TierError if it cannot be written."""
        try:
            with locks.alone(parent):
                _sweep(parent)
                self.path = parent / f"hyper-parallel-spill-{os.getpid()}-{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                lock = locks.hold(self.path)
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
        if _OURS.fullmatch(path.name) and not path.is_symlink() and not locks.is_held(path):
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s, which a process that has ended had left", path)


def _remove(process: int, path: Path, lock: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process is not the process
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
