"""Manifest of the files beside our checkpoint in a Trainer's `checkpoint-N`: sizes and digests.

The Trainer writes its small files before and after ours, so that none of ours can have their digests. The manifest is
written when all but the Trainer's last file are there, and replaced by one that has that file too. It is a sealed file
(`checkpoint.digest_json`). A folder without one was saved by an earlier release, or its owner has changed a file on
purpose and removed it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import folder_names
from hyper_parallel.checkpoint.digest_json import LARGEST, seal, unseal
from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.checkpoint.verify import file_damage
from hyper_parallel.untrusted import is_plain_name, open_within, read_bytes

MANIFEST = "verified.json"
_FORMAT = "hyper-parallel manifest"


def write_manifest(folder: Path) -> None:
    """Write the manifest of what is in `folder` now, but for our checkpoint, which has its own. Raises OSError."""
    ours = {str(name) for name in folder_names.committed(folder)}
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        regular = path.is_file() and not path.is_symlink() and all(map(is_plain_name, name.parts))
        if regular and name.parts[0] not in ours and str(name) != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[name.as_posix()] = {"bytes": file.tell(), "sha256": digest}
    publish(folder / MANIFEST, seal({"format": _FORMAT, "files": files}))


def manifest_damage(folder: Path) -> str | None:
    """What is wrong with the files that the manifest has, in words; None if nothing is, or if there is no manifest."""
    try:
        body = unseal(read_bytes(open_within(folder, MANIFEST), LARGEST))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    files = body.get("files")
    if body.get("format") != _FORMAT or not isinstance(files, dict):
        return f"{MANIFEST}: it is no manifest"
    for name, written in files.items():
        sized = isinstance(written, dict) and isinstance(written.get("bytes"), int)
        if not sized or not isinstance(written.get("sha256"), str):
            return f"{MANIFEST}: {name!r} has no size or no digest"
        if (reason := file_damage(folder, name, written)) is not None:
            return f"{reason} (if you changed it yourself, remove {MANIFEST})"
    return None
