"""Entry point: starts local workers, or runs this process as a launcher's worker."""

from __future__ import annotations

import os

from hyper_parallel.config.launched import Launched
from hyper_parallel.launch.external_launcher import run_joined
from hyper_parallel.launch.launcher_env import detect
from hyper_parallel.launch.local import run_local


def run(config: Launched, target: str) -> int:
    """Call the target ``package.module:function`` with `(config, Worker)` on every rank; returns the exit code.

    0: done. 1: a worker died or raised another exception than a HyperParallelError. 2: a worker raised a
    HyperParallelError, or the launcher's number of workers is not the strategy's. 130: Ctrl-C, SIGTERM, or SIGHUP to
    any process of the run; the workers got a stop request (`stop_requested`) and `launch.grace` seconds to save.
    Failures are printed on standard error, once.

    Without a launcher the workers are processes of this machine and this process imports no torch; under
    torchrun, srun or mpirun this process is the worker. Raises LaunchError when workers cannot be started.
    """
    place = detect(os.environ, config.launch.rendezvous)
    if place is None:
        return run_local(config, target)
    return run_joined(config, target, place)
