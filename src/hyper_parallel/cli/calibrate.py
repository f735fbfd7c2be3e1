"""``hyper-parallel calibrate``"""

from __future__ import annotations

import time
from pathlib import Path

import click

from hyper_parallel.cli.arguments import check_folder


@click.command(short_help="Measure this machine, so that predictions hold for it.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("cluster.yaml"),
    show_default=True,
    help="The cluster file to write. Flash is measured in its folder.",
)
@click.option(
    "--workers", type=int, default=4, show_default=True, help="The most workers that compute here at once."
)
@click.option("--quick", is_flag=True, help="Fewer shapes and sizes: seconds instead of a minute.")
def calibrate(out: Path, workers: int, quick: bool) -> None:
    """Measure this machine's speed and write it as a cluster file.

    The command measures matrix products and attention by shape and dtype, operators by name and size, the first
    touch of new memory, the optimizer, copies to host memory and flash (with one worker and, where workers share
    the cores, with several at once), and collectives of real workers by kind, ranks and size. Run it while the
    machine is idle: the spread of each figure shows how quiet it was.

    \b
    Examples:
      hyper-parallel calibrate
      hyper-parallel calibrate --quick --workers 2 --out here.yaml

    \b
    Exit codes:
      0    measured, and the file is written
      2    the file cannot be written, or a worker failed
      130  interrupted
    """
    from hyper_parallel.calibrate import Settings, render
    from hyper_parallel.calibrate import calibrate as measure
    from hyper_parallel.errors import ConfigError
    from hyper_parallel.report.table import terminal_width

    check_folder("--out", out)
    started = time.monotonic()

    parts, begun = 0, 0

    def total(count: int) -> None:
        nonlocal parts
        parts = count
        click.echo(
            f"{count} parts to measure, {'seconds' if quick else 'about a minute'} on an idle machine",
            err=True,
        )

    def progress(line: str) -> None:
        nonlocal begun
        passed = time.monotonic() - started
        # A part begins; what is not one says so by itself.
        begun = min(begun + 1, parts)
        left = f", about {passed / (begun - 1) * (parts - begun + 1):.0f} s left" if begun > 1 else ""
        click.echo(f"  {passed:5.1f} s  {line} ({begun} of {parts}{left})", err=True)

    settings = Settings(workers=workers, level="quick" if quick else "full", folder=out.absolute().parent)
    cluster = measure(settings, progress, total)
    try:
        cluster.dump(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    click.echo(render(cluster, terminal_width()))
    click.echo(f"\nwritten: {out} ({time.monotonic() - started:.0f} s)")
    click.echo(f"next:    hyper-parallel simulate FILE --cluster {out}")
