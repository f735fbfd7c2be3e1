"""`launch.run` in a fork of the tests' server, whose workers are forks, too: what it does, without start-up."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any, NoReturn

from harness.fork_server import fork_context
from harness.forked_workers import fork_server_of_workers
from hyper_parallel.config import RunConfig


def launched(
    config: RunConfig,
    entry: str = "hyper_parallel.train.trainer:main",
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """The exit code, and what was written to the errors."""
    with tempfile.TemporaryFile() as errors:
        given = (config, entry, {**os.environ, **(environment or {})}, DupFd(errors.fileno()))
        process = fork_context().Process(target=_launch, args=given)
        process.start()
        try:
            process.join(240)
        finally:
            process.kill()  # its workers end with it
            process.join()
        errors.seek(0)
        return process.exitcode, errors.read().decode()


def _launch(config: RunConfig, entry: str, environment: dict[str, str], errors: Any) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors.detach(), 2)
    sys.stdout, sys.stderr = (open(at, "w", buffering=1, closefd=False) for at in (1, 2))  # noqa: SIM115
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    fork_server_of_workers()
    from hyper_parallel.launch import run

    code = run(config, entry)
    sys.stderr.flush()
    os._exit(code)
