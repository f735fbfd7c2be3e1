"""``hyper-parallel doctor``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from hyper_parallel.cli.arguments import as_json


@click.command(short_help="Show versions, devices, links and ports; pack a bug report.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Also pack what a bug report needs into this .tar.gz or .zip file.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="A run's 'out' folder, whose logs and settings go into the bundle.",
)
@as_json
def doctor(bundle: Path | None, run: Path | None, as_json: bool) -> None:
    """Show this machine's versions, devices, links, memory and ports, and warn about problems.

    The bundle is one file to attach to a report: this table, the run's settings, the last lines of every rank's
    log and of the metrics. It holds no training text, no weights, and no environment variables except those
    of launchers and of the libraries named in the table.

    \b
    Examples:
      hyper-parallel doctor
      hyper-parallel doctor --bundle report.tar.gz --run runs/quickstart

    \b
    Exit codes:
      0    shown; the table lists the warnings 2    the bundle cannot be written 130  interrupted
    """
    from hyper_parallel.errors import ConfigError
    from hyper_parallel.integration import versions
    from hyper_parallel.launch.doctor import bundle as pack
    from hyper_parallel.launch.doctor import collect, render
    from hyper_parallel.report.table import terminal_width

    if run is not None and bundle is None:
        raise ConfigError("--run goes with --bundle FILE, into which the run's logs are packed")
    report = collect({row.package: str(row) for row in versions.rows()})
    click.echo(json.dumps(report, indent=2) if as_json else render(report, terminal_width(110)))
    if bundle is not None:
        click.echo(f"packed {pack(bundle, run, report)}", err=True)
