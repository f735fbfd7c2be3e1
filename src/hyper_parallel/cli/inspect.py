"""``hyper-parallel inspect``"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hyper_parallel.cli.arguments import as_json, run_file, trace_cache


@click.command(short_help="Show what a strategy keeps and sends, for any number of ranks.")
@run_file
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose bytes are shown."
)
@click.option(
    "--cluster",
    metavar="NAME",
    help="Give the peak of the order in which training runs the step there, as simulate does, instead of that of the "
    "model's code. NAME as for simulate.",
)
@as_json
def inspect(file: Path, overrides: tuple[str, ...], rank: int, cluster: str | None, as_json: bool) -> None:
    """Show what one rank stores and sends in a step under FILE's strategy.

    The command trains, allocates and starts nothing, and needs no data: the model is built without values, and one
    rank's step runs on fake tensors. Tables show each module pattern's Layout and bytes (parameters, gradients,
    optimizer, activations), and the collectives by axis, link level and kind. The peak is that of the order of the
    model's code; with --cluster it is that of simulate, which takes as long as simulate does.

    \b
    Examples:
      hyper-parallel inspect examples/quickstart.yaml
      hyper-parallel inspect examples/llama-405b.yaml
      hyper-parallel inspect run.yaml strategy.axes.tensor=8 --rank 3 --json
      hyper-parallel inspect run.yaml --cluster h100x64

    \b
    Exit codes:
      0    shown
      2    an error in the file, or a strategy that does not fit the model, reported in one line 130
      interrupted
    """
    from hyper_parallel import config
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.hub.download import Wanted

    run = fetched(config.load(file, overrides), Wanted.CONFIG)
    # Only now, because these need torch.
    from hyper_parallel.estimate import cluster_of, inspect_run
    from hyper_parallel.report.table import terminal_width
    from hyper_parallel.report.wait_line import announcing, waiting

    with announcing(sys.stderr if sys.stderr.isatty() else None), waiting("capturing one rank's step"):
        machine = None if cluster is None else cluster_of(cluster, run)
        report = inspect_run(run, rank, cluster=machine, cache=trace_cache(run))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table(terminal_width(150)))
