"""The command's side of the fork server: starts it, starts workers on it, and receives their exit statuses.

One server serves all runs of a process, one after another, so that torch is imported once. It ends with the process. A
controller borrows it and runs several jobs at once on it (`launch.roles`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from socket import socket
from typing import Any

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.stop import SAVE, STOPS

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hyper_parallel.launch.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class ForkServer:
    """A running fork server."""

    def __init__(self, spins: bool = True) -> None:
        """`spins`: whether OpenMP threads spin while they wait for their team (libgomp's default). If copy threads need
        one of the team's cores, spinning delays them.
        """
        self.spins = spins
        self.channel, theirs = Pipe()
        """To the server; `events` reads from it."""
        # One thread: numpy's linear algebra would otherwise start its own on import, and forks lose threads.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not spins:  # read once, when libgomp is loaded
            environ.setdefault("OMP_WAIT_POLICY", "passive")
        # The server inherits the mask, so that a signal to every process of the run waits until it takes signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, SAVE))
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOT,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether the server can take a run."""
        return self._process.poll() is None and not self.channel.closed

    def start(
        self,
        places: Sequence[WorkerPlace],
        config: Launched,
        target: str,
        preload: Sequence[str],
        listener: socket | None,
        board: int,
        *,
        job: int = 0,
        calls: Sequence[int] = (),
        logs: Sequence[str] = (),
    ) -> list[Connection]:
        """Fork a worker for each place; the pipe to each one's control thread.

        `listener` is handed to rank 0, the descriptor of the `PositionBoard` to all. `job`: the number in the events
        of these workers. `calls`: for workers of a controller, the descriptors of their ends for instruction lists;
        such workers ignore signals and never write to the terminal. `logs`: the file of each; left out,
        `logs.path_of`. Raises LaunchError when the server has ended.
        """
        message = {
            "do": "start",
            "job": job,
            "calls": bool(calls),
            "logs": list(logs),
            "places": [asdict(place) for place in places],
            "config": config.model_dump_json(context={"secrets": True}),
            "config_class": f"{type(config).__module__}:{type(config).__qualname__}",
            "target": target,
            "preload": list(preload),
            "listens": listener is not None,
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [Pipe() for _ in places]
        try:
            self.channel.send_bytes(json.dumps(message).encode())
            for descriptor in (_descriptor(sys.stdout, 1), _descriptor(sys.stderr, 2)):
                send_handle(self.channel, descriptor, self._process.pid)
            for _, theirs in pipes:
                send_handle(self.channel, theirs.fileno(), self._process.pid)
            for descriptor in (*calls, board):
                send_handle(self.channel, descriptor, self._process.pid)
            if listener is not None:
                send_handle(self.channel, listener.fileno(), self._process.pid)
        except OSError as error:
            raise LaunchError(self.why_it_ended()) from error
        finally:
            for _, theirs in pipes:
                theirs.close()
        return [ours for ours, _ in pipes]

    def signal(self, number: int, job: int = 0) -> None:
        """Send a signal to every worker of a job that is alive."""
        with contextlib.suppress(OSError):  # the server has ended, and the workers with it
            self.channel.send_bytes(json.dumps({"do": "signal", "number": int(number), "job": job}).encode())

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """The events within `timeout` seconds; returns after the first one.

        Raises LaunchError when the server has ended.
        """
        found: list[dict[str, Any]] = []
        try:
            while wait([self.channel], 0 if found else timeout):
                found.append(json.loads(self.channel.recv_bytes()))
        except (EOFError, OSError) as error:
            raise LaunchError(self.why_it_ended()) from error
        return found

    def why_it_ended(self) -> str:
        """An error line about a server that ended unexpectedly."""
        status = self._process.wait()
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        if status == -signal.SIGKILL:
            return "the process that holds the workers was killed by SIGKILL (out of memory, or by hand)"
        return (
            f"the process that loads PyTorch and starts the workers ended with status {status}"
            f"{': ' + said[-1] if said else ''}; see whether python -c 'import torch, transformers' works"
        )

    def close(self) -> None:
        """End the server, and with it every worker."""
        self.channel.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._process.kill()
        self._process.wait()
        atexit.unregister(self.close)


_server: ForkServer | None = None


def fork_server(spins: bool = True) -> ForkServer:
    """This process's fork server, started if there is none with the same `spins` (`ForkServer`)."""
    global _server
    if _server is None or not _server.alive or _server.spins != spins:
        if _server is not None:
            _server.close()
        _server = ForkServer(spins)
    return _server


def borrow(spins: bool = True) -> ForkServer:
    """A fork server for one borrower, until `give_back`: this process's, if it has one with the same `spins`."""
    global _server
    server, _server = fork_server(spins), None
    return server


def give_back(server: ForkServer) -> None:
    """End of `borrow`: the server serves later runs of this process. Its jobs have ended."""
    global _server
    if _server is None and server.alive:
        _server = server
    else:
        server.close()


def _descriptor(stream: Any, default: int) -> int:
    # Notebooks and test runners replace the streams by objects that are not files.
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return default
