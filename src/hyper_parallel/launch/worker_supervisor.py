"""Supervision of local workers: starts them on the fork server, hears their heartbeats, and notices how they end.

One server serves all runs of a process, one after another, so that torch is imported once. It ends with the process. A
controller borrows it and runs several jobs at once on it (`launch.roles`). What follows from a worker's message or end
is the owner's to decide: `launch.run` for a run, `launch.roles.local` for a group.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from socket import socket
from typing import Any

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.heartbeat import Beat, PositionBoard
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.stop import SAVE, STOPS
from hyper_parallel.launch.watchdog import Activities, Watchdog
from hyper_parallel.launch.worker_failure import Failure

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hyper_parallel.launch.fork_server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
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
        listener: socket | None,
        *,
        preload: Sequence[str] = (),
        job: int = 0,
        calls: Sequence[int] = (),
        logs: Sequence[str] = (),
        signalled: Callable[[int], None] = lambda number: None,
    ) -> LocalWorkers:
        """Fork a worker for each place.

        `listener` is handed to rank 0. `preload`: functions whose modules are imported before the fork, beside the
        target's. `job`: the number in the events of these workers. `calls`: for workers of a controller, the
        descriptors of their ends for instruction lists; such workers ignore signals and never write to the terminal.
        `logs`: the file of each; left out, `logs.path_of`. `signalled` is called with each signal that a worker got.
        Raises LaunchError when the server has ended.
        """
        # Imported once, before the fork: what every worker needs.
        modules = [
            name.partition(":")[0] for name in (target, *preload) if name.startswith("hyper_parallel.")
        ]
        if (family := config.model_type) is not None:
            modules.append(f"transformers.models.{family}.modeling_{family}")
        message = {
            "do": "start",
            "job": job,
            "calls": bool(calls),
            "logs": list(logs),
            "places": [asdict(place) for place in places],
            "config": config.model_dump_json(context={"secrets": True}),
            "config_class": f"{type(config).__module__}:{type(config).__qualname__}",
            "target": target,
            "preload": modules,
            "listens": listener is not None,
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [Pipe() for _ in places]
        board = PositionBoard.create(len(places))
        try:
            self.channel.send_bytes(json.dumps(message).encode())
            for descriptor in (
                _descriptor(sys.stdout, 1),
                _descriptor(sys.stderr, 2),
                *(theirs.fileno() for _, theirs in pipes),
                *calls,
                board.descriptor,
                *([] if listener is None else [listener.fileno()]),
            ):
                send_handle(self.channel, descriptor, self._process.pid)
        except OSError as error:
            raise LaunchError(self.why_it_ended()) from error
        finally:
            for _, theirs in pipes:
                theirs.close()
            board.close()
        ends = {place.rank: ours for place, (ours, _) in zip(places, pipes, strict=True)}
        return LocalWorkers(self, job, ends, board, signalled)

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
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        if status == -signal.SIGKILL:
            return "the process that holds the workers was killed by SIGKILL (out of memory, or by hand)"
        return (
            f"the process that loads PyTorch and starts the workers ended with status {status}"
            f"{': ' + lines[-1] if lines else ''}; see whether python -c 'import torch, transformers' works"
        )

    def close(self) -> None:
        """End the server, and with it every worker."""
        self.channel.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._process.kill()
        self._process.wait()
        atexit.unregister(self.close)


class LocalWorkers:
    """The workers of one job, by rank. Not safe for threads."""

    def __init__(
        self,
        server: ForkServer,
        job: int,
        ends: dict[int, Connection],
        board: PositionBoard,
        signalled: Callable[[int], None],
    ) -> None:
        self._server, self.job, self._board, self._signalled = server, job, board, signalled
        self.alive = ends
        """The pipes of the workers whose exit status is not known yet."""
        self.pids: dict[int, int] = {}
        """Empty until the server has forked them."""
        self.failures: list[Failure] = []
        self.beats: dict[int, Beat] = {}
        """The last heartbeats."""
        self.activities = Activities({})
        self.watchdog: Watchdog | None = None

    def watch(self, timeout: float | None, *, others: bool) -> None:
        """Have a watchdog hear the heartbeats from now on; the arguments are its own."""
        first = min(self.alive)
        self.watchdog = Watchdog(
            self.alive, timeout, others=others, board=lambda rank: self._board.read(rank - first)
        )

    def event(self, event: dict[str, Any]) -> tuple[int, int] | None:
        """Take in an event of the server; the rank and the exit status if a worker of this job has ended."""
        if event.get("job") != self.job:
            return None
        if event["event"] == "started":
            self.pids = dict(zip(self.alive, event["pids"], strict=True))
            self.activities = Activities(self.pids)
        elif event["event"] == "ended":
            return event["rank"], event["status"]
        return None

    def hear(self, rank: int) -> None:
        """Take in what a worker has said since the last call."""
        end = self.alive[rank]
        try:
            while not end.closed and end.poll():
                message = json.loads(end.recv_bytes())
                if message["event"] == "failed":
                    self.failures.append(Failure(**message["failure"]))
                elif message["event"] == "beat":
                    self.beats[rank] = Beat(**message["beat"])
                    if self.watchdog is not None:
                        self.watchdog.hear(rank, self.beats[rank])
                elif message["event"] == "signal":
                    self._signalled(message["number"])
        except (EOFError, OSError):
            end.close()

    def end(self, rank: int, status: int) -> Failure:
        """A worker has ended: the failure that it reported, else the one that its exit status is."""
        self.hear(rank)
        self.alive.pop(rank).close()
        failure = self.said(rank) or self._position(Failure.of_exit(rank, status))
        if self.watchdog is not None:
            self.watchdog.forget(rank)
        return failure

    def said(self, rank: int) -> Failure | None:
        """The failure of a rank that is known."""
        return next((failure for failure in self.failures if failure.rank == rank), None)

    def _position(self, failure: Failure) -> Failure:
        """The failure with the position of a rank that died in a schedule, and those of the others."""
        if self.watchdog is None or not self.watchdog.scheduled(failure.rank):
            return failure
        return failure.within(
            self.watchdog.position(failure.rank), self.watchdog.others_in_schedule(failure.rank)
        )

    def order(self, order: str) -> None:
        """Send an order to every worker that is alive (`control.Order`)."""
        for end in self.alive.values():
            with contextlib.suppress(OSError):  # it has ended, and the server says so soon
                end.send_bytes(json.dumps({"do": order}).encode())

    def signal(self, number: int) -> None:
        """Send a signal to every worker that is alive."""
        self._server.signal(number, self.job)

    def close(self) -> None:
        """Nothing more is heard; a worker that is alive counts as ended."""
        for end in self.alive.values():
            end.close()
        self.alive.clear()


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
