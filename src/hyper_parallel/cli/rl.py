"""``hyper-parallel rl``"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from hyper_parallel.cli.arguments import run_file


@click.command(short_help="Train a policy by reinforcement learning.")
@run_file
def rl(file: Path, overrides: tuple[str, ...]) -> None:
    """Train the policy that FILE describes by reinforcement learning.

    Workers are started on this machine, a group for each set of devices that 'roles' names: roles with the same devices
    take turns, others run at the same time. Metrics, samples, logs and checkpoints go to the file's 'out' folder; a
    run that was interrupted goes on from its newest checkpoint. The trained policy is generated with like any run's:
    hyper-parallel generate OUT.

    OVERRIDES set single keys for this run; values are YAML, and {...} replaces a whole section.

    \b
    Examples:
      hyper-parallel rl examples/rl/grpo-sort.yaml
      hyper-parallel rl examples/rl/grpo-sort.yaml rl.staleness=0 out=runs/synchronous
      hyper-parallel rl examples/rl/grpo-sort.yaml rl.algorithm=rloo rl.steps=100
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

    from hyper_parallel.config.rl_run import load_rl

    config = load_rl(file, overrides)
    handlers = {
        number: signal.signal(number, ask)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        from hyper_parallel.rl.controller.run import run
        from hyper_parallel.rl.controller.summary import lines

        summary = run(config, folder=file.parent, stop=lambda: stopping, told=click.echo)
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    for line in lines(summary):
        click.echo(line)
    if summary.stopped:
        sys.exit(130)
