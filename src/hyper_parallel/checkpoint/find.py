"""Finds the checkpoint that a folder of a user's means."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hyper_parallel.checkpoint.verify import newest
from hyper_parallel.errors import CheckpointError


def find(folder: Path, tell: Callable[[str], object]) -> Path:
    """The folder itself if it is a checkpoint, else the newest intact checkpoint in it: in a run's folder, its
    `checkpoints` folder, or that of a Trainer's run. `tell` is given a line for each that is passed over.

    Raises CheckpointError if there is none.
    """
    if folder.name.startswith("step-"):
        return folder
    within = folder / "checkpoints"
    found = newest(within if within.is_dir() else folder)
    for one in [] if found is not None else _of_a_trainer(folder):
        try:
            found = newest(one)
        except CheckpointError as error:
            tell(f"passed over {one}: {error}")
        if found is not None:
            break
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give a run's folder or that of one checkpoint")
    for path, reason in found.skipped:
        tell(f"passed over {path}: {reason}")
    return found.path


def _of_a_trainer(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` in a folder, newest first."""
    found = [(re.fullmatch(r"checkpoint-([0-9]+)", path.name), path) for path in folder.iterdir()]
    return [
        path for _, path in sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
    ]
