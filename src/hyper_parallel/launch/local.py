"""Local workers: started from the fork server, watched until all have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TextIO

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import PREFIX, LaunchError
from hyper_parallel.launch import rendezvous
from hyper_parallel.launch.failure import RESUME, Failure, cause
from hyper_parallel.launch.folder import RunFolder
from hyper_parallel.launch.forkserver import ForkServer, fork_server
from hyper_parallel.launch.place import Place, split_address
from hyper_parallel.launch.run_lock import run_lock
from hyper_parallel.launch.stop import handling
from hyper_parallel.launch.world import workers_of

SETTLE_S = 3.0
"""How long a lost connection may wait for the failure that explains it."""
END_S = 5.0
"""How long workers have to end after SIGTERM, before SIGKILL."""
SAVE_S = 60.0
"""How long workers have to save and end after the first Ctrl-C."""


def run_local(config: RunConfig, target: str) -> int:
    """Start this machine's share of the workers and watch them; the exit code (see `launch.run`).

    Raises LaunchError when they cannot be started.
    """
    launch = config.launch
    world = workers_of(config)
    if world % launch.nodes:
        raise LaunchError(
            f"{world} workers cannot be spread evenly over {launch.nodes} machines; change the strategy's axes "
            "or launch.nodes"
        )
    share = world // launch.nodes
    host, port = split_address(launch.rendezvous)
    first = launch.node_rank == 0
    # Bound before anything is started, so that a taken port costs no time and a free one cannot be taken.
    with rendezvous.listen(host, port) if first and world > 1 else contextlib.nullcontext() as listener:
        if listener is not None:
            port = listener.getsockname()[1]
        places = [
            Place("local", launch.node_rank * share + index, world, index, share, host, port)
            for index in range(share)
        ]
        folder = RunFolder(config.out)
        # The first machine holds the folder for all.
        with run_lock(config.out) if first else contextlib.nullcontext():
            folder.make()
            code = 2
            try:
                code = _Watch(config).run(places, target, listener)
            finally:
                if code == 2:
                    folder.forget()
        return code


_BEGIN_LINE = "\r\x1b[2K"
"""To the first column, and the line erased (ECMA-48: CR, EL)."""


class _Watch:
    """The state of one run: who is alive, who failed, and how often the user asked to stop."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.alive: dict[int, Connection] = {}
        self.failures: list[Failure] = []
        self.asked = 0  # how often Ctrl-C, SIGTERM or SIGHUP came
        self.told: signal.Signals | None = None  # the last signal that the workers were sent
        self.kill_at = float("inf")
        self.started = False
        self.shown = False

    def run(self, places: Sequence[Place], target: str, listener: socket.socket | None) -> int:
        server = fork_server()
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with handling(dict.fromkeys(stops, lambda number, frame: self._ask())):
            try:
                reports = server.start(places, self.config, target, _preload(self.config, target), listener)
                self.alive = {place.rank: end for place, end in zip(places, reports, strict=True)}
                while self.alive:
                    for event in server.events(timeout=0.1):
                        self.started = self.started or event["event"] == "started"
                        if event["event"] == "ended":
                            self._ended(event["rank"], event["status"])
                    for rank in list(self.alive):
                        self._hear(rank)
                    if self.asked and not self.started:
                        break  # nothing is there yet that could be saved
                    self._act(server)
            except LaunchError as error:
                if not self.started:
                    raise
                _say(f"{PREFIX}{error}; {RESUME}")
                return 1
            finally:
                if self.alive:
                    server.close()  # and every worker with it
                if self.asked or self.failures:
                    _give_back_terminal()
        if self.asked and (self.failures == [] or not self.shown):
            return 130
        return self._verdict()

    def _ask(self) -> None:
        self.asked += 1

    def _hear(self, rank: int) -> None:
        end = self.alive[rank]
        with contextlib.suppress(EOFError, OSError):
            if end.poll():
                self.failures.append(Failure.from_json(end.recv_bytes()))

    def _ended(self, rank: int, status: int) -> None:
        self._hear(rank)
        self.alive.pop(rank).close()
        explained = any(failure.rank == rank for failure in self.failures)
        if status != 0 and not explained and self.told not in (signal.SIGTERM, signal.SIGKILL):
            self.failures.append(Failure.of_exit(rank, status))

    def _act(self, server: ForkServer) -> None:
        now = time.monotonic()
        began = cause(self.failures)
        waited = began is not None and now - min(failure.time for failure in self.failures) > SETTLE_S
        if began is not None and not self.shown and (began.kind != "lost" or waited or not self.alive):
            self._show(began)
            if self.alive:
                self._tell(server, signal.SIGTERM, END_S)
        elif self.asked == 1 and self.told is None and self.alive:
            _say("stopping: the workers finish their step and save; once more ends them at once")
            self._tell(server, signal.SIGINT, SAVE_S)
        elif self.alive and self.told != signal.SIGKILL and (self.asked > 1 or now > self.kill_at):
            if self.asked == 1 and self.told == signal.SIGINT:
                _say(
                    f"the workers did not end in {SAVE_S:g} s and are killed; committed checkpoints are safe"
                )
            self._tell(server, signal.SIGKILL, END_S)

    def _tell(self, server: ForkServer, number: signal.Signals, patience: float) -> None:
        server.signal(number)
        self.told = number
        self.kill_at = time.monotonic() + patience

    def _show(self, failure: Failure) -> None:
        self.shown = True
        # After Ctrl-C ranks leave one by one; a lost connection is then no news.
        if not (self.asked and failure.kind == "lost"):
            _say(failure.render(self.config.out))

    def _verdict(self) -> int:
        began = cause(self.failures)
        return began.exit_code if began is not None else 0


def _preload(config: RunConfig, target: str) -> list[str]:
    """Modules that every worker would import itself: loaded once, before the fork."""
    modules = [target.partition(":")[0]] if target.startswith("hyper_parallel.") else []
    if config.model.config is not None:
        family = str(config.model.config["model_type"])
        modules.append(f"transformers.models.{family}.modeling_{family}")
    return modules


def _say(text: str) -> None:
    # Where rank 0 draws a line in place, what is said stands in its stead and not behind it.
    sys.stderr.write((_BEGIN_LINE if _draws(sys.stderr) else "") + text + "\n")
    sys.stderr.flush()


def _give_back_terminal() -> None:
    """Remove the line that a rank 0 which was killed has left half drawn, and show the cursor that it has hidden."""
    if _draws(sys.stdout):
        sys.stdout.write(_BEGIN_LINE + "\x1b[?25h")
        sys.stdout.flush()


def _draws(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
