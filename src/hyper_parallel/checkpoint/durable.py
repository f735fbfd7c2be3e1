"""Durable file writes (fsync), and file-system errors as one-line messages."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.units import format_bytes

REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
    | {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
)
"""File-system errors that a user can fix; any other system error counts as a defect."""


_REPEAT = "run the same command again, and leave 'out' where it is until the run has ended"


@dataclass(frozen=True)
class Written:
    """Bytes written to a file: counted and digested in memory, never read back."""

    bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file and fsync it. Raises OSError."""
    digest = hashlib.sha256()
    count = 0
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            count += view.nbytes
            while view.nbytes:  # an unbuffered write may take less than it was given
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return Written(count, digest.hexdigest())


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with _folder_descriptor(folder) as descriptor:
        _fsync_names(descriptor)


@contextlib.contextmanager
def _folder_descriptor(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync_names(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not fsync folders; renames there are durable.
        if error.errno != errno.EINVAL:
            raise


def check_new(target: Path) -> None:
    """Raise CheckpointError if `target` exists and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; export to a new one")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` on leaving; after an error, nothing of it stays.

    Raises CheckpointError if `target` cannot be written.
    """
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        yield partial
        fsync_folder(partial)
        os.rename(partial, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise explain(error, target) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(path: Path, data: bytes) -> Written:
    """Create or replace the file `path` atomically and durably, by way of a temporary name. Raises OSError and then
    leaves nothing. Who sees the file may move or remove its folder at once.
    """
    hidden = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with _folder_descriptor(path.parent) as folder:
        try:
            written = write_file(hidden, [data])
            os.rename(hidden, path)
        except OSError:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise
        _fsync_names(folder)
    return written


def discard(folder: Path) -> None:
    """Remove a folder after renaming it to a name that readers ignore, so that no reader sees it partly removed.

    Raises OSError if it cannot be renamed; remaining files are left to the next writer.
    """
    hidden = folder.with_name(f"{folder.name.partition('.')[0]}.deleted-{secrets.token_hex(4)}")
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def explain(error: OSError, path: Path, action: str = "write") -> CheckpointError:
    """A CheckpointError that states in one line what the file system refused and how to fix it."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            why = f"{'no space is left' if error.errno == errno.ENOSPC else 'the disk quota is used up'}"
            why += f"{_room(path)}; free some, lower 'checkpoint.keep' or put 'out' on another disk"
        case errno.EFBIG:
            why = (
                "it is larger than a file may be here; raise the limit (ulimit -f) or use another file system"
            )
        case errno.EROFS | errno.EACCES | errno.EPERM:
            why = f"it is not {'writable' if action == 'write' else 'readable'} ({error.strerror}); "
            why += "change its permissions or put 'out' elsewhere"
        case errno.ENOTDIR | errno.EEXIST:
            why = "a file is in the way where a folder is needed; move it or put 'out' elsewhere"
        case errno.EISDIR:
            why = "a folder is in the way where a file is needed; move it or put 'out' elsewhere"
        case errno.ENOENT | errno.ESTALE if action == "write":
            why = f"its folder was removed while it was in use; {_REPEAT}"
        case errno.ENOENT:
            why = "it does not exist"
        case _:
            why = error.strerror or type(error).__name__
    return CheckpointError(f"cannot {action} {path}: {why}")


@contextlib.contextmanager
def explained(out: Path) -> Iterator[None]:
    """Raise as CheckpointError, in one line, what the file system refuses a run whose folder is `out`.

    System errors that a user cannot fix are raised as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE) and not out.is_dir():
            raise explain(error, Path(error.filename or out)) from error
        if error.errno not in REFUSALS:
            raise
        raise explain(error, Path(error.filename or out)) from error


def _room(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.is_dir():
            return f" ({format_bytes(shutil.disk_usage(folder).free)} free)"
    return ""
