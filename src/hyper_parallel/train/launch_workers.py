"""`Trainer.run` in a plain script: as the only worker, or as the parent or a member of several."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from torch import nn

from hyper_parallel import compat
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import LaunchError, WorkersFailedError
from hyper_parallel.launch import Worker, run
from hyper_parallel.launch.rendezvous import detect
from hyper_parallel.launch.run_folder import run_lock
from hyper_parallel.launch.stop import SAVE, listening
from hyper_parallel.train.summary import Summary


@contextlib.contextmanager
def alone(config: RunConfig) -> Iterator[Worker]:
    """This process as a run's only worker: Ctrl-C is a request to stop, no process group is made, and
    the run's folder is held. Raises LaunchError if another run holds it."""
    backend = compat.backend(config.launch.device)
    device = backend.device(0)
    backend.set_device(device)
    with run_lock(config.out), listening((signal.SIGINT, signal.SIGTERM, SAVE)):
        yield Worker(rank=0, local_rank=0, world=1, local_world=1, device=device, backend=backend)


_given: list[nn.Module] = []
"""The model that the script under a launcher gave; its worker is the same process."""


def run_on_workers(config: RunConfig, model: nn.Module | None) -> Summary:
    """Start the run's local workers, or join a launcher's, and wait; the summary that rank 0 left.

    Raises LaunchError when a model is given that processes started here would not have, or when the run fails.
    """
    if model is not None and detect(os.environ, config.launch.rendezvous) is None:
        raise LaunchError(
            f"a model of one's own cannot be handed to {config.effective_strategy.world} processes that are "
            "started here; start the script with torchrun, or set launch.workers=1"
        )
    _given[:] = [] if model is None else [model]
    code = run(config, f"{__name__}:main")
    if code != 0:
        raise WorkersFailedError(code, config.out)
    return Summary.read(config.out)


def main(config: RunConfig, worker: Worker) -> None:
    """What each worker of a script runs."""
    from hyper_parallel.train.trainer import Trainer

    Trainer(config, _given[0] if _given else None).run(worker)
