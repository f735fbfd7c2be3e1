"""Lost steps: the steps that an aborted run loses since its last checkpoint, and how to resume.

They are read from the run's folder, so that they are known however the run ended.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from hyper_parallel.untrusted import open_regular

_TAIL = 1 << 16
"""Bytes at the end of the metrics file that contain the last step."""


def watch_steps(out: str | Path) -> Callable[[], str | None]:
    """Called before a run; the returned function describes the loss in one line after the run. It returns None if
    nothing is lost, or if the run has done no step.
    """
    metrics = Path(out) / "metrics.jsonl"
    before = _mark(metrics)

    def lost() -> str | None:
        done = _last_step(metrics) if _mark(metrics) != before else None
        return None if done is None else _lost(Path(out), done)

    return lost


def _lost(out: Path, done: int) -> str | None:
    from hyper_parallel.checkpoint import folder_names, verify

    folder = out / "checkpoints"
    with contextlib.suppress(OSError):
        for name in folder_names.committed(folder):
            if verify.reason_to_pass_over(folder / str(name)) is not None:
                continue
            if name.step >= done:
                return None
            count = f"the {done - name.step} steps" if done - name.step > 1 else "the step"
            return (
                f"hyper-parallel: lost: {count} since {folder / str(name)}, the newest checkpoint; step {done} was "
                "the last one done. The same command goes on from there; checkpoint.every sets how much can be lost"
            )
    return (
        f"hyper-parallel: lost: all {done} steps, since there is no checkpoint to go on from in {folder}; "
        "checkpoint.every sets how much can be lost"
    )


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _last_step(path: Path) -> int | None:
    """The last step whose update is recorded."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.readall().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if "loss" in record:
                return int(record["step"])
    return None
