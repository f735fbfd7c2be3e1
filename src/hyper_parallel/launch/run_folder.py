"""The run's folder: its lock, one run at a time, and its removal if the run is refused.

A run takes the lock before it writes anything and holds it until its processes have ended.
It is a kernel lock (flock, which NFS clients forward to the server as a byte-range lock), which is released when its
process ends, however that happens. The file names the holder, for the message of a refused run. Only on a file system
without locks the file itself is the lock: a file of a dead process on this machine is then taken over, and one of
another machine has to be removed by hand.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.errors import LaunchError
from hyper_parallel.proc import try_lock

NAME = ".run.lock"


@contextlib.contextmanager
def run_lock(out: str | Path) -> Iterator[None]:
    """Lock the run folder `out`, which is created if missing.

    Raises LaunchError if another run holds it, with its process, or if the folder cannot be written.
    """
    path = Path(out).absolute() / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except OSError as error:
        raise LaunchError(
            f"cannot write to the run's folder {path.parent}: {error.strerror}; set 'out'"
        ) from error
    try:
        yield
    finally:
        # While the lock is held: a waiting process sees that the file is gone, and creates a new one.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int:
    """The descriptor of the file, locked and with this process in it. Raises LaunchError, OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            locked = try_lock(descriptor)
            if locked is False:
                raise _refusal(path, _holder(descriptor))
            if locked is None and (holder := _holder(descriptor)) is not None and _may_live(holder):
                raise _refusal(path, holder, by_hand=True)
            if _is(path, descriptor):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the run that held it has ended meanwhile, and removed the file


def _is(path: Path, descriptor: int) -> bool:
    """Whether this path still names the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode(), 0
    )


def _holder(descriptor: int) -> dict[str, Any] | None:
    """The holder recorded in the file; None if there is none, or an incomplete record."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        signed = json.loads(os.pread(descriptor, 1000, 0))
        return {"pid": int(signed["pid"]), "host": str(signed["host"]), "since": str(signed["since"])}
    return None


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether the process may still exist; always true for another machine."""
    if holder["host"] != socket.gethostname():
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return bool(holder["pid"] != os.getpid())


def _refusal(path: Path, holder: dict[str, Any] | None, by_hand: bool = False) -> LaunchError:
    who = "" if holder is None else f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    mend = f"; if that process is dead, remove {path}" if by_hand else ""
    return LaunchError(
        f"another run{who} is at work in {path.parent}; wait for it or end it, or give this run another 'out'{mend}"
    )


class RunFolder:
    """`out` as it was before this run."""

    def __init__(self, out: str | Path) -> None:
        self._out = Path(out)
        # Deepest first: `out`, then those of its parents that do not exist either.
        self._missing = [folder for folder in (self._out, *self._out.parents) if not folder.exists()]

    def make(self) -> None:
        """Make it, with the folder for the logs. Raises LaunchError when the system refuses."""
        logs = self._out / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"cannot write to the run's folder {logs}: {error.strerror}; set 'out'"
            ) from error

    def forget(self) -> None:
        """Remove the folder that `make` created if it contains only logs, since the error line has been shown."""
        with contextlib.suppress(OSError):
            ours = ("logs", NAME)
            if self._out in self._missing and all(entry.name in ours for entry in self._out.iterdir()):
                shutil.rmtree(self._out)
                for folder in self._missing[1:]:
                    folder.rmdir()
