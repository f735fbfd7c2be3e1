"""``hyper-parallel verify``"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from hyper_parallel.cli.arguments import as_json


@click.command(short_help="Prove that the strategy computes what one device computes.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--driver",
    type=click.Choice(["auto", "local", "gloo"]),
    default="auto",
    show_default=True,
    help="local: all ranks in this one process. gloo: real worker processes, as training starts them. "
    "auto: gloo for a pipeline and for a model that one process cannot follow, else local.",
)
@as_json
def verify(
    file: Path, overrides: tuple[str, ...], driver: Literal["auto", "local", "gloo"], as_json: bool
) -> None:
    """Verify that FILE's strategy computes what one device computes.

    The command runs one optimizer step twice, on one device and under the strategy, with the same weights and text,
    and compares the loss, the gradient norm and every parameter's gradient and updated value; a table shows the
    worst. A line says what the owner check found: whether one device computes the loss, the rows and the packed
    documents of the model's own code; for a strategy of one device it is all there is to say. Only real workers write
    files: their logs and the report, to the file's 'out' folder.

    \b
    Examples:
      hyper-parallel verify examples/quickstart.yaml
      hyper-parallel verify run.yaml --driver gloo
      hyper-parallel verify run.yaml strategy.axes.tensor=4 --json

    \b
    Exit codes:
      0    equal within the tolerances shown
      1    a mismatch
      2    an error in the file or the data, reported in one line
      130  interrupted
    """
    from hyper_parallel import config
    from hyper_parallel.cli.hub_models import fetched
    from hyper_parallel.cli.preflight import check
    from hyper_parallel.hub.download import Wanted

    run = fetched(config.load(file, overrides), Wanted.MODEL)
    check(run, writes=driver == "gloo")
    # Only now, because these need torch.
    from hyper_parallel.report.table import terminal_width
    from hyper_parallel.report.wait_line import announcing, waiting
    from hyper_parallel.verify import verify_file, verify_one_device

    screen = sys.stderr if sys.stderr.isatty() else None
    _ = run.effective_strategy  # refuses axes that are open
    if run.strategy.axes.world == 1:
        with announcing(screen), waiting("a comparison with the model's own code"):
            owner = verify_one_device(run)
        click.echo(
            json.dumps({"owner": owner}) if as_json else f"one device against the model's own code: {owner}"
        )
        return
    with announcing(screen), waiting("a step on one device, and one under the strategy"):
        report = verify_file(run, driver)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table(width=terminal_width()))
    sys.exit(0 if report.ok else 1)
