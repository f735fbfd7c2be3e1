"""``hyper-parallel verify``"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from hyper_parallel.cli.arguments import as_json, run_file


@click.command(short_help="Prove that the strategy computes what one device computes.")
@run_file
@click.option(
    "--driver",
    type=click.Choice(["local", "gloo"]),
    default="local",
    show_default=True,
    help="local: all ranks in this one process. gloo: real worker processes, as training starts them.",
)
@as_json
def verify(file: Path, overrides: tuple[str, ...], driver: Literal["local", "gloo"], as_json: bool) -> None:
    """Prove that FILE's strategy computes what one device computes.

    One optimizer step is done twice, on one device and on the strategy, with the same weights and the same text.
    The loss, the gradient norm and every parameter's gradient and updated value are compared; a table shows
    the worst. Only real workers write anything: their logs and the report, to the file's 'out' folder.

    \b
    Examples:
      hyper-parallel verify examples/quickstart.yaml
      hyper-parallel verify run.yaml --driver gloo
      hyper-parallel verify run.yaml strategy.axes.tensor=4 --json

    \b
    Exit codes:
      0    equal within the tolerances shown
      1    a mismatch
      2    a mistake in the file or the data, told in one line
      130  interrupted
    """
    from hyper_parallel import config
    from hyper_parallel.cli.preflight import check

    run = config.load(file, overrides)
    check(run, writes=driver == "gloo")
    # Only now, because these need torch.
    from hyper_parallel.verify import verify_file

    report = verify_file(run, driver)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table())
    sys.exit(0 if report.ok else 1)
