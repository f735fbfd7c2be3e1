"""The entry: start local workers, or be the worker that a launcher made of this process."""

from __future__ import annotations

import os

from hyper_parallel.config import RunConfig
from hyper_parallel.launch.external_launcher import run_joined
from hyper_parallel.launch.launcher_env import detect
from hyper_parallel.launch.local import run_local


def run(config: RunConfig, target: str) -> int:
    """Call the target ``package.module:function`` with `(config, Worker)` on every rank; the exit code.

    0: done. 1: a worker died or raised what is no HyperParallelError. 2: a HyperParallelError of a worker,
    or a launcher whose number of workers is not the strategy's. 130: Ctrl-C, SIGTERM, or SIGHUP to any
    process of the run; the workers were asked to stop (`stop_requested`) and had `launch.grace` seconds to
    save. Failures are shown on standard error, once.

    Without a launcher the workers are processes of this machine and this process imports no torch; under
    torchrun, srun or mpirun this process is the worker. Raises LaunchError when workers cannot be started.
    """
    place = detect(os.environ, config.launch.rendezvous)
    if place is None:
        return run_local(config, target)
    return run_joined(config, target, place)
