"""``hyper-parallel rl``"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyper_parallel.cli.arguments import run_file
from hyper_parallel.standard_streams import lasting_stdout

if TYPE_CHECKING:
    from hyper_parallel.config.rl import RLConfig


@click.command(short_help="Train a policy by reinforcement learning.")
@run_file
@click.option(
    "--plan",
    is_flag=True,
    help="With 'roles: auto': measure, print the layouts with their predicted times, and end. The run takes the "
    "choice.",
)
def rl(file: Path, overrides: tuple[str, ...], plan: bool) -> None:
    """Train the policy that FILE describes by reinforcement learning.

    Workers are started on this machine, a group for each set of devices that 'roles' names: roles with the same devices
    take turns, others run at the same time. Metrics, samples, logs and checkpoints go to the file's 'out' folder; a
    run that was interrupted goes on from its newest checkpoint. The trained policy is generated with like any run's:
    hyper-parallel generate OUT.

    With 'roles: auto' the devices of the roles are chosen first, from times that are measured on them.

    OVERRIDES set single keys for this run; values are YAML, and {...} replaces a whole section.

    \b
    Examples:
      hyper-parallel rl examples/rl/grpo-sort.yaml
      hyper-parallel rl examples/rl/grpo-sort.yaml rl.staleness=0 out=runs/synchronous
      hyper-parallel rl examples/rl/grpo-sort.yaml rl.algorithm=rloo rl.steps=100
      hyper-parallel rl examples/rl/grpo-sort.yaml roles=auto
      hyper-parallel rl examples/rl/grpo-sort.yaml roles=auto roles.devices=8 --plan
      hyper-parallel generate runs/grpo-sort --prompt "53142="

    Ctrl-C or SIGTERM ends the step under way and saves; a second Ctrl-C ends at once.

    \b
    Exit codes:
      0    trained to the last step
      1    workers were lost too often, or a defect
      2    an error in the file, the tasks or the reward, reported in one line
      130  interrupted
    """
    stopping = False

    def ask(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        click.echo("stopping: the step under way ends and is saved; once more ends at once", err=True)

    from hyper_parallel.cli.hub_models import fetched_rl
    from hyper_parallel.cli.preflight import check_results
    from hyper_parallel.config.rl import load_rl
    from hyper_parallel.errors import ConfigError

    config = load_rl(file, overrides)
    if plan and not config.roles.open:
        raise ConfigError(
            f"{file}: --plan chooses the devices of roles, and they are written; add roles=auto to have them chosen"
        )
    config = fetched_rl(config)
    check_results(config)
    handlers = {
        number: signal.signal(number, ask)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        if plan:
            _plan(config, file, lambda: stopping)
            return
        from hyper_parallel.rl.run import run, summary_lines

        with lasting_stdout(config.wording.kept):
            summary = run(config, folder=file.parent, stop=lambda: stopping, told=click.echo)
            for line in summary_lines(summary):
                click.echo(line)
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    if summary.stopped:
        sys.exit(130)


def _plan(config: RLConfig, file: Path, stop: Callable[[], bool]) -> None:
    """Print the layouts of a run with their predicted times."""
    from hyper_parallel.rl.role_split import Stopped, plan_split

    try:
        choice = plan_split(config, folder=file.parent, stop=stop, told=click.echo)
    except Stopped:
        sys.exit(130)
    if choice.predictions:
        click.echo(f"\n{choice.table()}")
    click.echo(
        f"kept for the run: {config.out}/split.json, and {config.out}/run.yaml with the roles written out"
    )
