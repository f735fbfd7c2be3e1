"""Names of the folders in a checkpoint directory, and which of them a reader accepts.

``step-00000120`` is committed; ``step-00000120-r1`` is a second, newer checkpoint of the same step (the first was
damaged, or the run was rewound). ``….partial-<hex>`` is being written, ``….deleted-<hex>`` is being removed; readers
ignore these, and the next writer removes them after a crash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FORMAT = "hyper-parallel checkpoint"
VERSION = 1
COMMIT = "commit.json"
ASSETS = "assets"
_COMMITTED = re.compile(r"step-([0-9]{8,})(?:-r([1-9][0-9]*))?")
_STALE = re.compile(r"step-[0-9]{8,}(?:-r[1-9][0-9]*)?\.(?:partial|deleted)-[0-9a-f]+")
_FAILED = re.compile(r"rank-([0-9]{5,})\.failed-([0-9]+)")


@dataclass(frozen=True, order=True)
class Name:
    """Sort key of a committed checkpoint: newer is greater."""

    step: int
    revision: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-r{self.revision}" if self.revision else "")


def committed(folder: Path) -> list[Name]:
    """The checkpoints in a folder by their names, newest first; empty if there is no such folder."""
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = filter(None, map(_COMMITTED.fullmatch, entries))
    return sorted((Name(int(m[1]), int(m[2] or 0)) for m in matches), reverse=True)


def free(folder: Path, step: int) -> Name:
    """The name for a new checkpoint of `step`: newer than all existing ones of that step."""
    taken = [name.revision for name in committed(folder) if name.step == step]
    return Name(step, max(taken, default=-1) + 1)


def stale(folder: Path) -> list[Path]:
    """The folders that interrupted writers left."""
    return [folder / entry for entry in os.listdir(folder) if _STALE.fullmatch(entry)]


def data_file(rank: int) -> str:
    """Name of the file with the tensors that a rank wrote."""
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """Name of a rank's index, which locates its pieces in its data file; its presence shows that the rank is done."""
    return f"rank-{rank:05d}.json"


def failed_file(rank: int, code: int) -> str:
    """Name of an empty file that records that a rank failed, with its errno (0: not a file-system error).

    A name appears atomically and needs no space on a full disk.
    """
    return f"rank-{rank:05d}.failed-{code}"


def failures(entries: Iterable[str]) -> dict[int, int]:
    """Rank to errno of each failed rank among the names in a partial folder."""
    matches = filter(None, map(_FAILED.fullmatch, entries))
    return {int(match[1]): int(match[2]) for match in matches}
