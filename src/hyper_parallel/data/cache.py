"""Cached array files, verified on reading and built by one process at a time.

An array file is one line of JSON (format, name, dtype, count, BLAKE2b digest of the bytes, and the writer's metadata),
padded to 4096 bytes, then the little-endian elements. It is written under a temporary name and renamed when complete,
so that readers see all of it or nothing; a file that is truncated, changed, or under another's name does not match its
header and counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import DataError
from hyper_parallel.proc import LockWait, try_lock
from hyper_parallel.untrusted_files import open_lock, open_regular, parse_json

T = TypeVar("T")
log = logging.getLogger(__name__)

_FORMAT = 1
_HEADER = 4096
_DTYPES = {name: np.dtype(name) for name in ("|u1", "<u2", "<u4", "<i8")}
"""The element types of array files."""
_POLL_SECONDS = 0.05
# A dead holder frees its lock at once (the kernel closes its files), unless a process that it forked has it still,
# which `LockWait` sees; this bounds the wait elsewhere, as on a network file system whose other host has vanished.
# Building twice is only slower, never wrong.
_LOCK_SECONDS = 1800.0


class ArrayWriter:
    """Appends elements to an array file, which appears under its name on `commit`."""

    def __init__(self, path: Path, dtype: str) -> None:
        """`dtype`: a numpy type string with its byte order, such as `<u2`."""
        self._path = path
        self._dtype = _DTYPES[dtype]
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        self._digest = hashlib.blake2b(digest_size=32)
        self._file = open(self._temporary, "xb")  # noqa: SIM115 - lives as long as the writer
        self._file.write(b" " * _HEADER)
        self.count = 0

    def append(self, values: NDArray[Any]) -> None:
        """Adds the elements of an array of one dim, cast to the file's dtype."""
        data = np.ascontiguousarray(values, self._dtype).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.count += len(values)

    def commit(self, **meta: Any) -> None:
        """Writes the header with `meta`, and renames the file to its final name."""
        line = {
            "format": _FORMAT,
            "name": self._path.name,
            "dtype": self._dtype.str,
            "count": self.count,
            "digest": self._digest.hexdigest(),
            "meta": meta,
        }
        header = json.dumps(line).encode()
        assert len(header) < _HEADER, "the header is too long"
        self._file.seek(0)
        self._file.write(header.ljust(_HEADER - 1) + b"\n")
        self._file.close()
        os.replace(self._temporary, self._path)

    def discard(self) -> None:
        """Removes an uncommitted file; does nothing after a commit."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def read_array(path: Path) -> tuple[NDArray[Any], dict[str, Any]] | None:
    """The elements, mapped read-only, and the writer's metadata; None if absent, truncated or changed."""
    try:
        with open_regular(path, links=False) as file:
            head = file.read(_HEADER)
            line = parse_json(head)
            if line["format"] != _FORMAT:
                return None
            # By name: numpy has element types that are pointers.
            dtype, count = _DTYPES[line["dtype"]], line["count"]
            if type(count) is not int or count < 0 or not isinstance(line["meta"], dict):
                raise ValueError("no count")
            if line.get("name", path.name) != path.name:  # its elements are whole, and those of another key
                log.warning("%s is a copy of %s; it is made again", path, line["name"])
                return None
            if os.fstat(file.fileno()).st_size != _HEADER + dtype.itemsize * count:
                log.warning("%s is cut short; it is made again", path)
                return None
            digest = hashlib.blake2b(digest_size=32)
            while block := file.read(1 << 22):
                digest.update(block)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read the cache file {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged; it is made again", path)
        return None
    if digest.hexdigest() != line["digest"]:
        log.warning("%s is damaged; it is made again", path)
        return None
    if count == 0:
        return np.zeros(0, dtype), line["meta"]
    return np.memmap(path, dtype, "r", offset=_HEADER, shape=(count,)), line["meta"]


def read_or_build_parts(
    folder: Path, key: str, read: Callable[[str], T | None], build: Callable[[], None]
) -> tuple[T, T]:
    """The training and the held-out part of what `read` reads by its name, after `build` if one was absent."""

    def both() -> tuple[T, T] | None:
        train, held_out = read(f"{key}-train"), read(f"{key}-eval")
        return None if train is None or held_out is None else (train, held_out)

    return read_or_build(folder, key, both, build)


def read_or_build(folder: Path, key: str, read: Callable[[], T | None], build: Callable[[], None]) -> T:
    """The result of `read`, after `build` if it was absent; one process builds while the others wait.

    `key` names the lock, and begins the names of all files that `build` writes to `folder`. Raises DataError
    when the folder cannot be written.
    """
    if (found := read()) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock") as alone:
            if (found := read()) is not None:
                return found
            if alone:
                # Left by killed builders; no other process writes while the lock is held.
                for stale in folder.glob(f"{key}*.tmp"):
                    stale.unlink(missing_ok=True)
            build()
        found = read()
    except OSError as error:
        raise DataError(
            f"cannot write the cache {folder}: {error.strerror}; set data.cache to a folder that can be "
            "written and has room"
        ) from error
    if found is None:
        raise DataError(
            f"the cache {folder} does not keep what is written to it; set data.cache to another folder"
        )
    return found


@contextlib.contextmanager
def _locked(path: Path, timeout: float = _LOCK_SECONDS) -> Iterator[bool]:
    """Holds an exclusive lock on a file; yields False if the caller has to work without it."""
    with os.fdopen(open_lock(path), "wb", buffering=0) as file:
        deadline = time.monotonic() + timeout
        alone, wait = False, LockWait(path)
        while not alone:
            try:
                locked = try_lock(file.fileno())
            except OSError:
                locked = None  # work done twice is slower, never wrong
            if locked is None or (locked is False and wait.holder_ended()):
                break
            if locked:
                alone = True
            elif time.monotonic() > deadline:
                log.warning("waited %.0f s for %s; going on without it", timeout, path)
                break
            else:
                time.sleep(_POLL_SECONDS)
        # Closing the file frees the lock. It is not unlinked: another process may be about to lock it.
        yield alone
