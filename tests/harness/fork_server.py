"""The fork server of a pytest process: ranks (`run_ranks`) and commands (`run_command`) are forks of it.

It imports `harness.preloaded` once. Each fork is new: no test sees what another left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from hyper_parallel.proc import die_with

_lock = threading.Lock()
_started: int | None = None
"""The process id of the server that `fork_context` started last."""


def fork_context() -> ForkServerContext:
    """The context whose processes are forks of the server, which runs from here on."""
    global _started
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.preloaded"])
    with _lock:
        if _running() and server_pid() != _started:
            # The package's own code, run by a test in this process, started it, with its own imports only.
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        if not _running():
            # The server does not take over sys.path before Python 3.13, only the environment.
            with _environment(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1"):
                forkserver.ensure_running()
            _started = server_pid()
    return context


def _running() -> bool:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def server_pid() -> int:
    """The process id of the server, for `end_with_server`."""
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def end_with_server(server: int) -> None:
    """In a fork: end when the server ends, as it does with the test process, also where that is killed."""
    # The server ends when nobody has the other end of this pipe, and each fork has a copy of it.
    tests: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(tests._forkserver_alive_fd)
    tests._forkserver_alive_fd = None
    die_with(server)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def warm_up() -> None:
    """Return when the server has done its imports. They are no test's cost."""
    if _started is None or not _running():
        process = fork_context().Process(target=time.sleep, args=(0,))
        process.start()
        process.join()
