"""``hyper-parallel export``"""

from __future__ import annotations

import re
from pathlib import Path

import click

from hyper_parallel.errors import CheckpointError


@click.command(short_help="Write a checkpoint as a folder that Transformers loads.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(checkpoint: Path, out: Path) -> None:
    """Write CHECKPOINT to the new folder OUT, which AutoModelForCausalLM.from_pretrained loads.

    CHECKPOINT is a run's folder (its newest intact checkpoint is exported), its 'checkpoints' folder, or the folder
    of one step; for a Trainer's run, a 'checkpoint-N' or the folder that contains these. A checkpoint of any strategy
    can be exported. Every byte is verified, and only one tensor at a time is in memory.

    \b
    Examples:
      hyper-parallel export runs/quickstart exported/quickstart
      python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('exported/quickstart')"

    \b
    Exit codes:
      0    written
      2    no such checkpoint, it is damaged, or OUT exists and is not empty; the error is one line 130
      interrupted
    """
    # Checks that need no torch come before its import.
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder; give a run's folder or that of one checkpoint")
    from hyper_parallel.checkpoint import export as write

    path = _find(checkpoint)
    click.echo(f"{path} -> {write(path, out)}")


def _find(folder: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest intact checkpoint in it."""
    from hyper_parallel.checkpoint import newest

    if folder.name.startswith("step-"):
        return folder
    within = folder / "checkpoints"
    found = newest(within if within.is_dir() else folder)
    for one in [] if found is not None else _of_a_trainer(folder):
        try:
            found = newest(one)
        except CheckpointError as error:
            click.echo(f"hyper-parallel: passed over {one}: {error}", err=True)
        if found is not None:
            break
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give a run's folder or that of one checkpoint")
    for path, reason in found.skipped:
        click.echo(f"hyper-parallel: passed over {path}: {reason}", err=True)
    return found.path


def _of_a_trainer(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` in a folder, newest first."""
    found = [(re.fullmatch(r"checkpoint-([0-9]+)", path.name), path) for path in folder.iterdir()]
    return [
        path for _, path in sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
    ]
