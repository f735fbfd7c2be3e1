"""Processes and the system as Linux describes them: memory, file locks and their holders, ends, open files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

from hyper_parallel.errors import LaunchError

log = logging.getLogger(__name__)

MEMORY = "/proc/meminfo"
"""The system's memory."""
PROCESS = "/proc/self/status"
"""This process's."""
LOCKS = Path("/proc/locks")
"""The locks of processes that this one can see (proc_locks(5))."""
SAID_S = 3.0
"""Seconds before a wait for a lock is worth a line."""
WANTED_FILES, LEAST_FILES, FILES_PER_WORKER = 4096, 128, 8
"""Open files that a run asks the system for, and those without which it cannot start workers."""


def bytes_in(path: str, key: str) -> int | None:
    """The bytes of a line; None where the file or the line is missing."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What flock says on a file system without locks."""


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file for this process, which closing it undoes; False where another descriptor has the lock, None on
    a file system without locks. Never waits. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return None
    return True


def lock_holder(path: Path) -> int | None:
    """The number of the process that locked a file with flock; None where nothing here says so.

    It is the process that asked for the lock. A process that it forked may have it still when that one has ended.
    """
    try:
        inode = path.stat().st_ino
        rows = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return None
    for (
        row
    ) in rows:  # `1: FLOCK ADVISORY WRITE 4021 fe:01:2093 0 EOF`; waiting ones have `->` in the second place
        if len(row) >= 6 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode):
            return int(row[4]) if int(row[4]) > 0 else None  # 0: a process of another container
    return None


class LockWait:
    """The wait for one lock file: says after `SAID_S` who holds it, and sees when that process is dead."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: float | None = None
        self._said = False

    def holder_ended(self) -> bool:
        """Whether the process that took the lock has ended, so that nobody works under it. Called while it is held."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if now - self._began < SAID_S:
            return False
        holder = lock_holder(self._path)
        if holder is not None and not _runs(holder):
            log.warning(
                "the lock %s is left over from process %d, which has ended; going on without it",
                self._path,
                holder,
            )
            return True
        if not self._said:
            self._said = True
            # A worker of the same run is at work for all of them, which the run itself shows.
            level = (
                logging.INFO if holder is not None and _parent(holder) == os.getppid() else logging.WARNING
            )
            who = f"process {holder}" if holder is not None else "a process that this machine does not show"
            log.log(level, "waiting for the lock %s, which %s holds", self._path, who)
        return False


def _runs(process: int) -> bool:
    """Whether a process has not ended. One that its parent has not waited for (a zombie) has."""
    fields = _status(process)
    # Another user's process may be hidden from this one.
    return fields[0] not in "ZX" if fields else Path(f"/proc/{process}").exists()


def _parent(process: int) -> int | None:
    fields = _status(process)
    return int(fields[1]) if fields else None


def _status(process: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: the state, the parent, and so on; empty where it cannot be read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cores() -> int:
    """The processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """Have the kernel send this process SIGKILL when `parent`, its parent's process id, ends (Linux only).

    Elsewhere the processes notice by the closed pipe. Exits at once when the parent has gone already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def room_for_files(workers: int) -> None:
    """Raise this process's limit on open files, which its workers inherit, as far as the system lets it.

    Raises LaunchError if `workers` workers cannot be started with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED_FILES:
        return
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    least = LEAST_FILES + FILES_PER_WORKER * workers
    if wanted < least:
        need = "a worker needs" if workers == 1 else f"{workers} workers need"
        raise LaunchError(
            f"this process may open {wanted} files, and {need} {least}; raise the limit (ulimit -n, "
            "LimitNOFILE of a service, or the container's)"
        )
