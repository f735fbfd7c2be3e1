"""Names of the folders in a checkpoint directory, and which of them a reader accepts.

``step-00000120`` is committed; ``step-00000120-r1`` is a second checkpoint of the same step (after the first
was found damaged, or the run was rewound), and newer. ``….partial-<hex>`` is being written,
``….deleted-<hex>`` is being removed; no reader takes these, and the next writer removes what a crash left of
them.
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
    """A committed checkpoint's place in the order: newer is greater."""

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
    """The name that a new checkpoint of `step` gets: newer than all that are there of that step."""
    taken = [name.revision for name in committed(folder) if name.step == step]
    return Name(step, max(taken, default=-1) + 1)


def stale(folder: Path) -> list[Path]:
    """What interrupted writers left."""
    return [folder / entry for entry in os.listdir(folder) if _STALE.fullmatch(entry)]


def data_file(rank: int) -> str:
    """The tensors that a rank wrote."""
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """Where in its data file each of a rank's pieces is; its presence says that the rank is done."""
    return f"rank-{rank:05d}.json"


def failed_file(rank: int, code: int) -> str:
    """An empty file whose name says that a rank gave up, and by which errno (0: not the file system's).

    A name appears whole or not at all, and needs no room on a disk that is full.
    """
    return f"rank-{rank:05d}.failed-{code}"


def failures(entries: Iterable[str]) -> dict[int, int]:
    """Rank to errno of each failed rank among the names in a partial folder."""
    matches = filter(None, map(_FAILED.fullmatch, entries))
    return {int(match[1]): int(match[2]) for match in matches}
