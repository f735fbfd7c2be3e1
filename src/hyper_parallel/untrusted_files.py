"""Safe reading of untrusted files: regular files only, bounded size, names inside their folder.

An untrusted file may be a pipe that blocks its reader, a link to another place, an endless device, or a text that
expands to a thousand times its size when it is parsed. Every reader of a checkpoint, a model's folder, a run file or a
cache uses these functions:

- `open_regular`, `open_within`: a descriptor of a regular file, and of nothing else; never blocks.
- `open_to_append`, `open_lock`, `own_folder`: a file that a run goes on with, a lock file, and a folder that only this
  user can write to, created if missing.
- `read_bytes`, `read_json`: reads with a limit on bytes and on nesting depth.
- `is_plain_name`: whether a name from a file can be joined to a folder and stay inside it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from typing import Any

from hyper_parallel.units import format_bytes

DEPTH = 64
"""Maximum nesting depth of lists and mappings. Files in practice have a tenth of it."""
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> FileIO:
    """Open a regular file for reading, unbuffered. `links`: the path itself may be a symbolic link.

    Raises OSError, with the reason in words, for anything else, and never blocks.
    """
    return _opened(os.fspath(path), links, None)


def open_within(folder: str | os.PathLike[str], name: str) -> FileIO:
    """Open a regular file below a folder by a relative name, none of whose parts may be a symbolic link.

    The folder itself may be one. Raises OSError as `open_regular` does.
    """
    *parents, last = name.split("/")
    if not all(map(is_plain_name, (*parents, last))):
        raise OSError(errno.EINVAL, "its name leads out of the folder")
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            there = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = there
        return _opened(last, False, here)
    finally:
        os.close(here)


def _opened(path: str, links: bool, folder: int | None) -> FileIO:
    # Looked at before it is opened, since opening a device may do something; and after, since it may be exchanged.
    _refuse_irregular(os.stat(path, dir_fd=folder, follow_symlinks=links))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        _refuse_irregular(os.fstat(descriptor))
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_irregular(found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, and only a regular file is allowed here")
    words = next((words for is_kind, words in _KINDS if is_kind(found.st_mode)), "it is no file")
    raise OSError(errno.EINVAL, f"{words}, and a file is needed")


def read_bytes(file: FileIO, limit: int) -> bytes:
    """Read all of an open file and close it. Raises OSError, before reading, if it has more than `limit` bytes."""
    with file:
        size = os.fstat(file.fileno()).st_size
        found = b"" if size > limit else _all_of(file, limit)
        if size > limit or len(found) > limit:
            raise OSError(
                errno.EFBIG, f"it has {format_bytes(max(size, len(found)))}, more than {format_bytes(limit)}"
            )
        return found


def _all_of(file: FileIO, limit: int) -> bytes:
    parts, left = [], limit + 1
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_json(path: str | os.PathLike[str], limit: int, *, links: bool = True) -> Any:
    """The content of a JSON file. Raises OSError as `open_regular` and `read_bytes` do, ValueError as `parse_json`."""
    return parse_json(read_bytes(open_regular(path, links=links), limit))


def parse_json(data: bytes | str) -> Any:
    """The parsed JSON text. Raises ValueError, with the reason in words, also if it is nested too deeply."""
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError("not JSON: it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError("not JSON: it has a number that is too long") from error
    except RecursionError as error:
        raise ValueError(f"not JSON of at most {DEPTH} levels: it is nested too deeply") from error
    level = [found]
    for _ in range(DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise ValueError(f"not JSON of at most {DEPTH} levels: it is nested too deeply")


def is_plain_name(name: object) -> bool:
    """Whether a name is a plain file name: printable text, no separators, no leading dot, not too long."""
    if not isinstance(name, str) or not name or name.startswith(".") or not name.isprintable():
        return False
    return not set(name) & set("/\\") and len(name.encode("utf-8", "surrogatepass")) <= 255


def refuse_irregular_entries(folder: str | os.PathLike[str]) -> None:
    """Raise OSError, with the name, if an entry of a folder is neither a file nor a folder.

    For folders that another library reads, which would block on a pipe. Links are followed, since model caches
    contain them; dangling links are left to the reader.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat()
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise OSError(errno.ELOOP, "it is a symbolic link to itself", entry.path) from None
                continue
            if not stat.S_ISDIR(found.st_mode):
                try:
                    _refuse_irregular(found)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, entry.path) from None


def open_lock(path: str | os.PathLike[str]) -> int:
    """A descriptor of a lock file, which is created if missing; its content does not change.

    Raises OSError for a symbolic link, which could create or open a file elsewhere, and never blocks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor for appending to a regular file, which is created if missing. Symbolic links are followed.

    Raises OSError, with the reason in words, for anything else, and never blocks: a pipe without a reader would.
    """
    # Not blocking matters to pipes only; a regular file is written to as always.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            _refuse_irregular(os.stat(path))
        raise
    try:
        _refuse_irregular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def own_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder that only this user can write to, or check an existing one. Its parent may be anybody's.

    Raises OSError if it belongs to another user, or is open to others.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if (reason := not_ours(path)) is not None:
            raise PermissionError(errno.EPERM, f"{reason}; remove it, or have its owner remove it") from None


def not_ours(folder: str | os.PathLike[str]) -> str | None:
    """Why other users could write to a folder, in words; None if only this user can. Raises OSError if it does not
    exist.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write there (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def printable(text: str) -> str:
    """Text for a terminal or a log, with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
