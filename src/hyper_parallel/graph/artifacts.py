"""Artifacts on disk: plain data as bytes with a digest, and a folder that several processes fill together.

The bytes are: magic · blake2b of the rest · the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hyper_parallel.proc import LockWait, try_lock
from hyper_parallel.untrusted_files import open_lock, own_folder

_DIGEST = 16


class Unreadable(Exception):
    """Bytes are no graph, or one that this process cannot have."""


def sealed(magic: bytes, body: bytes) -> bytes:
    """The bytes of a file."""
    return magic + _digest(body) + body


def opened(magic: bytes, content: bytes) -> bytes:
    """The content that was sealed. Raises Unreadable."""
    head = len(magic) + _DIGEST
    body = content[head:]
    if content[: len(magic)] != magic or content[len(magic) : head] != _digest(body):
        raise Unreadable("it is damaged, or of another version")
    return body


def deflated(data: Any) -> bytes:
    """Data as JSON, with its length in front."""
    text = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)
    return len(text).to_bytes(8, "big") + text


def inflated(body: bytes, at: int) -> tuple[Any, int]:
    """The content that `deflated` packed, from a place on, and where it ends."""
    begin = at + 8
    end = begin + int.from_bytes(body[at:begin], "big")
    return json.loads(zlib.decompress(body[begin:end])), end


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


# A folder of compiled subgraphs that several processes use at once.
#
# Each artifact has a folder under its digest. It counts only with its manifest, a digest of every file, which is
# written last; without one, or where a file differs from it, the folder is emptied and filled again. Whoever fills a
# folder holds a lock on it, and the others fill other folders meanwhile: ranks that need the same artifacts share the
# work.

T = TypeVar("T")
log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_POLL_SECONDS = 0.05


def own(folder: Path) -> Path:
    """The part of a cache's folder that only this user can write to: what is kept there is loaded as code.

    Raises OSError where it is somebody else's, or open to others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"user-{os.geteuid()}"
    own_folder(mine)
    return mine


def obtain(
    folder: Path,
    make: Mapping[str, Callable[[Path], None]],
    load: Callable[[Path], T],
    deadline: float,
) -> tuple[dict[str, T], int]:
    """Every artifact of `make`, by its digest, and how many this process made. `make` fills an empty folder.

    `deadline`: on the monotonic clock. Raises TimeoutError when it has passed and something is missing still, OSError
    when the folder cannot be written, and what `make` and `load` raise for a new artifact.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, T] = {}
    count = 0
    waits = {name: LockWait(folder / f"{name}.lock") for name in make}
    while len(found) < len(make):
        before = len(found)
        for name in make.keys() - found.keys():
            with _locked(folder / f"{name}.lock", waits[name]) as alone:
                if not alone:
                    continue
                place = folder / name
                ready = _read(place, load)
                if ready is None:
                    ready, count = _made(place, make[name], load), count + 1
                found[name] = ready
            if len(found) < len(make) and time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {len(make)} subgraphs are compiled")
        if len(found) == before:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process still compiles {len(make) - len(found)} of {len(make)} subgraphs"
                )
    return found, count


def _read(place: Path, load: Callable[[Path], T]) -> T | None:
    """The file's content, if it is complete."""
    try:
        manifest = json.loads((place / _MANIFEST).read_bytes())
        whole = bool(manifest) and all(_of_file(place / name) == known for name, known in manifest.items())
    except (OSError, ValueError, AttributeError):
        whole = False
        if not place.exists():
            return None
    if not whole:
        log.warning("%s is damaged or was not finished; it is compiled again", place)
        return None
    return load(place)


def _made(place: Path, make: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    make(place)
    ready = load(place)  # before the manifest, which then knows of what loading leaves behind
    manifest = {
        str(path.relative_to(place)): _of_file(path)
        for path in sorted(place.rglob("*"))
        if path.is_file() and "locks" not in path.parts
    }
    temporary = place / f"{_MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest))
    os.replace(temporary, place / _MANIFEST)
    return ready


def _of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@contextlib.contextmanager
def _locked(path: Path, wait: LockWait) -> Iterator[bool]:
    """Tries to hold an exclusive lock; yields False when another process holds it that lives."""
    with os.fdopen(open_lock(path), "wb", buffering=0) as file:
        # Where a file system has no locks or fails, making a thing twice is slower, never wrong.
        try:
            free = try_lock(file.fileno()) is not False
        except OSError:
            free = True
        yield free or wait.holder_ended()
