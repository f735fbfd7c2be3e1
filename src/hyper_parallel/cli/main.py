"""The entry point: subcommands, and how every failure ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence

import click

from hyper_parallel import standard_streams
from hyper_parallel._version import __version__
from hyper_parallel.cli.arguments import one_line
from hyper_parallel.cli.calibrate import calibrate
from hyper_parallel.cli.clusters import clusters
from hyper_parallel.cli.convert import convert
from hyper_parallel.cli.doctor import doctor
from hyper_parallel.cli.examples import examples
from hyper_parallel.cli.export import export
from hyper_parallel.cli.generate import generate
from hyper_parallel.cli.inspect import inspect
from hyper_parallel.cli.plan import plan
from hyper_parallel.cli.rl import rl
from hyper_parallel.cli.schema import schema
from hyper_parallel.cli.simulate import simulate
from hyper_parallel.cli.train import train
from hyper_parallel.cli.verify import verify
from hyper_parallel.errors import PREFIX, FaultError, HyperParallelError, PlaceError, WorkersFailedError
from hyper_parallel.untrusted_files import printable

_ANSWERS = ("simulate", "plan")
"""Subcommands that make large graphs, print an answer and end."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class _InOrder(click.Group):
    """Lists the subcommands in the order in which a new user needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 a check failed or the run died; 2 a mistake in the input; 130 interrupted.",
)
@click.version_option(__version__, prog_name="hyper-parallel")
def command() -> None:
    """Train a model written for one device on many, as if they were one computer.

    One YAML file declares the model, the data, the training and how to parallelize it; the model's code is unchanged.

    \b
    Start here:
      hyper-parallel examples
      hyper-parallel train examples/quickstart.yaml
      hyper-parallel verify examples/quickstart.yaml
      hyper-parallel train examples/quickstart.yaml train.steps=20 strategy.axes.tensor=1

    Every key of the file can be overridden as key=value. An editor completes and checks the file with the
    schema (see 'hyper-parallel schema --help').
    """


for _subcommand in (
    train,
    generate,
    rl,
    verify,
    inspect,
    simulate,
    plan,
    clusters,
    export,
    convert,
    examples,
    schema,
    calibrate,
    doctor,
):
    command.add_command(_subcommand)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    A HyperParallelError is printed on standard error without a traceback; the exit code is 2, or 1 if memory or a
    disk failed (FaultError). If a launcher started several workers on this machine, only the first one prints it.
    Without arguments the help is printed. Any other exception is a defect and shows its traceback; Python then exits
    with 1.
    """
    standard_streams.begin()
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None and sys.argv[1:2] and sys.argv[1] in _ANSWERS:
        # The process ends without a search for garbage, which takes as long to walk through a graph as a pass does.
        gc.disable()
        atexit.register(gc.freeze)
    try:
        command.main(args=list(given) or ["--help"], prog_name="hyper-parallel", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        if _speaks():
            click.echo(f"{PREFIX}{printable(one_line(error, given))}", err=True)
            _report(one_line(error, given))
        sys.exit(error.exit_code)
    except WorkersFailedError as error:
        sys.exit(error.code)
    except HyperParallelError as error:
        if isinstance(error, PlaceError) or _speaks():
            for line in str(error).split("\n"):
                click.echo(f"{PREFIX}{printable(line)}", err=True)
            _report(printable(str(error)))
        sys.exit(1 if isinstance(error, FaultError) else 2)
    except (click.Abort, KeyboardInterrupt):
        from hyper_parallel.launch.external_launcher import speaks

        # A launcher ends the other workers of one that has failed and said why.
        if speaks(os.environ):
            click.echo("hyper-parallel: interrupted", err=True)
        sys.exit(INTERRUPTED)


def _report(text: str) -> None:
    from hyper_parallel.launch.external_launcher import let_others_come, report_reason

    report_reason(text)
    let_others_come()


def _speaks() -> bool:
    """Whether this process prints the error; waits if another worker of a launcher prints it."""
    from hyper_parallel.launch.external_launcher import let_speak, speaks

    if speaks(os.environ):
        return True
    let_speak()
    return False


if __name__ == "__main__":
    main()
