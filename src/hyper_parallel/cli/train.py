"""``hyper-parallel train``"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hyper_parallel.cli.arguments import run_file
from hyper_parallel.cli.interrupts import interruptible
from hyper_parallel.standard_streams import lasting_stdout


@click.command(short_help="Train what a run file describes.")
@run_file
@click.option("--profile", is_flag=True, help="Measure a few steps, operator by operator (train.profile).")
@click.option(
    "--resume-from",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Go on from the checkpoint of this step (checkpoint.resume_from).",
)
def train(file: Path, overrides: tuple[str, ...], profile: bool, resume_from: int | None) -> None:
    """Train the model that FILE describes.

    The command starts as many workers on this machine as the product of the strategy's axes; under torchrun, Slurm
    or MPI it joins their workers. With 'strategy: auto' the planner chooses the strategy for the available workers
    and prints it. Metrics, logs and checkpoints go to the file's 'out' folder. If that folder has checkpoints, the
    run continues from the newest intact and healthy one, or from the one that --resume-from names.

    OVERRIDES set single keys for this run; values are YAML, and {...} replaces a whole section.

    \b
    Examples:
      hyper-parallel train examples/quickstart.yaml
      hyper-parallel train run.yaml train.steps=100 strategy.axes.tensor=4 'data.train=[a.txt, b.txt]'
      hyper-parallel train run.yaml launch.workers=1          the same run on one device
      hyper-parallel train run.yaml strategy=auto launch.workers=4
      torchrun --nproc-per-node 4 -m hyper_parallel train run.yaml

    Ctrl-C or SIGTERM saves a checkpoint and ends the workers; a second Ctrl-C ends them at once. SIGUSR1 saves a
    checkpoint and continues.

    \b
    Exit codes:
      0    trained to the last step
      1    the run died: a worker ended, or a defect
      2    an error in the file, the data or the machine's set-up, reported in one line
      130  interrupted
    """
    with interruptible():
        # Inside the context, since these imports take most of the time before the run starts.
        from hyper_parallel import config, launch
        from hyper_parallel.cli.hub_models import fetched
        from hyper_parallel.cli.preflight import check, check_memory
        from hyper_parallel.hub.download import Wanted

        if resume_from is not None:
            overrides = (*overrides, f"checkpoint.resume_from={resume_from}")
        run = config.load(file, overrides)
        if profile and run.train.profile is None:
            run = config.load(file, [*overrides, "train.profile={}"])
        run = fetched(run, Wanted.MODEL)
        check(run)
        check_memory(run)
        target = "planner.auto.entry" if run.open else "train.trainer"
        with lasting_stdout(run.wording.kept):
            code = launch.run(run, f"hyper_parallel.{target}:main")
    sys.exit(code)
