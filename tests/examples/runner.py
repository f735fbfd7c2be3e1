"""Commands of examples, run in a folder in which `examples/` is found as in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.forked_command import run_command, run_script

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """Of a process that is no worker of a launcher and finds this package's source."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHERS and not key.startswith("SLURM_")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


def run(folder: Path, *command: str, env: Mapping[str, str] | None = None) -> str:
    """What a command writes; it must end with 0."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return written(done)


def cli(folder: Path, *words: str) -> str:
    """What `hyper-parallel` writes."""
    return written(run_command(*words, folder=folder, env=environment()))


def script(folder: Path, file: str, *words: str) -> str:
    """What a Python file writes."""
    return written(run_script(folder / file, *words, folder=folder, env=environment()))


def written(done: subprocess.CompletedProcess[str]) -> str:
    """The output and the errors of a command that ended with 0."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def folder_with_examples(folder: Path) -> Path:
    """A link to examples/ in an empty folder, so that runs do not write into the repository."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder
