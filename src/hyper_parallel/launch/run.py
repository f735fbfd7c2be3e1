"""Run of a target on every rank: local workers are started and supervised here; a launcher's worker joins the rest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TextIO

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import PREFIX, LaunchError
from hyper_parallel.launch import rendezvous
from hyper_parallel.launch.external_launcher import run_joined
from hyper_parallel.launch.failure import Failure, cause, watch_steps
from hyper_parallel.launch.forkserver import ForkServer, fork_server
from hyper_parallel.launch.heartbeat import Beat, PositionBoard
from hyper_parallel.launch.rendezvous import WorkerPlace, detect, split_address, workers_of
from hyper_parallel.launch.run_folder import RunFolder, run_lock
from hyper_parallel.launch.stop import SAVE, STOPS, handling
from hyper_parallel.launch.watchdog import Activities, Watchdog
from hyper_parallel.proc import room_for_files


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


SETTLE_S = 3.0
"""Seconds that a lost connection waits for the failure that explains it."""
END_S = 5.0
"""Seconds that workers have to end after another one has failed, before SIGKILL."""
INTERRUPTED = 130
"""The exit code of a run that received a stop request, and of a worker that left with nothing to save."""
REPEAT_S = 0.3
"""A second SIGINT within this time counts as the same one, as when `timeout` or `kill` signals a group."""


def run_local(config: Launched, target: str) -> int:
    """Start this machine's share of the workers and supervise them; returns the exit code.

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
    room_for_files(share)
    host, port = split_address(launch.rendezvous)
    first = launch.node_rank == 0
    # Bound before anything is started, so that a taken port costs no time and a free one cannot be taken.
    with rendezvous.listen(host, port) if first and world > 1 else contextlib.nullcontext() as listener:
        if listener is not None:
            port = listener.getsockname()[1]
        places = [
            WorkerPlace("local", launch.node_rank * share + index, world, index, share, host, port)
            for index in range(share)
        ]
        folder = RunFolder(config.out)
        # The first machine holds the folder for all.
        with run_lock(config.out) if first else contextlib.nullcontext():
            folder.make()
            lost = watch_steps(config.out)
            code = 2
            try:
                code = _Watch(config).run(places, target, listener)
            finally:
                if code == 2:
                    folder.forget()
            if first and code != 0 and (line := lost()) is not None:
                _say(line)
        return code


_BEGIN_LINE = "\r\x1b[2K"
"""To the first column, and the line erased (ECMA-48: CR, EL)."""


class _Watch:
    """The state of one run: live workers, failures, and pending requests."""

    def __init__(self, config: Launched) -> None:
        self.config = config
        self.alive: dict[int, Connection] = {}
        self.failures: list[Failure] = []
        self.asked: float | None = None  # when a signal first asked the run to stop
        self.at_once = False  # Ctrl-C came again
        self.saves = 0  # how often a signal asked for a checkpoint
        self.suspended = False  # Ctrl-Z
        self.told: str | None = None  # the last order to the workers that ends them
        self.kill_at = float("inf")
        self.started = False
        self.shown = False
        self.watchdog: Watchdog | None = None
        self.activities = Activities({})
        self.left = False  # some worker ended because it was asked to before it had anything to save

    def run(self, places: Sequence[WorkerPlace], target: str, listener: socket.socket | None) -> int:
        handlers = {
            **dict.fromkeys(STOPS, lambda number, frame: self._ask(number)),
            SAVE: lambda number, frame: self._ask(number),
            signal.SIGTSTP: lambda number, frame: setattr(self, "suspended", True),
        }
        with handling(handlers):
            # Beside a budget's copies a team of threads has not all cores to itself.
            server = fork_server(spins=self.config.strategy.memory.device is None)
            board = PositionBoard.create(len(places))
            try:
                preload = _preload(self.config, target)
                reports = server.start(places, self.config, target, preload, listener, board.descriptor)
                self.alive = {place.rank: end for place, end in zip(places, reports, strict=True)}
                if places[0].world > 1:
                    others = len(places) < places[0].world
                    first = places[0].rank
                    self.watchdog = Watchdog(
                        self.alive,
                        self.config.launch.timeout,
                        others=others,
                        board=lambda rank: board.read(rank - first),
                    )
                while self.alive:
                    for event in server.events(timeout=0.1):
                        if event["event"] == "started":
                            self.started = True
                            self.activities = Activities(dict(zip(self.alive, event["pids"], strict=True)))
                        elif event["event"] == "ended":
                            self._ended(event["rank"], event["status"])
                        elif event["event"] == "signal":
                            self._pass_on(event["number"])
                    for rank in list(self.alive):
                        self._hear(rank)
                    if self.suspended:
                        self._suspend(server)
                    if self.asked is not None and not self.started:
                        break  # nothing to save yet
                    self._act(server)
            except LaunchError as error:
                if self.asked is not None and not self.started:
                    return INTERRUPTED
                if not self.started:
                    raise
                _say(f"{PREFIX}{error}; {self.config.wording.resume}")
                return 1
            finally:
                board.close()
                if self.alive:
                    server.close()  # and every worker with it
                if self.asked is not None or self.failures:
                    _give_back_terminal()
        if self.asked is not None and not self.shown:
            return INTERRUPTED
        return self._verdict()

    def _ask(self, number: int) -> None:
        """Handle a signal to this process."""
        again = self.asked is not None and time.monotonic() - self.asked > REPEAT_S
        if number == signal.SIGINT and again:
            self.at_once = True
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Handle a signal to any process of the run; signals to several processes at once count as one request."""
        if number == SAVE:
            self.saves += 1
        elif self.asked is None:
            self.asked = time.monotonic()

    def _suspend(self, server: ForkServer) -> None:
        """Ctrl-Z: stop and continue the workers (not part of the terminal's job) together with this process."""
        self.suspended = False
        server.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        server.signal(signal.SIGCONT)

    def _hear(self, rank: int) -> None:
        end = self.alive[rank]
        with contextlib.suppress(EOFError, OSError):
            while end.poll():
                message = json.loads(end.recv_bytes())
                if message["event"] == "failed":
                    self.failures.append(Failure(**message["failure"]))
                elif message["event"] == "beat" and self.watchdog is not None:
                    self.watchdog.hear(rank, Beat(**message["beat"]))
                elif message["event"] == "signal" and message["number"] != SAVE:
                    # One rank's request to save reaches the others in the step's reduction.
                    self._pass_on(message["number"])

    def _ended(self, rank: int, status: int) -> None:
        self._hear(rank)
        self.alive.pop(rank).close()
        position, others = self._in_schedule(rank)
        if self.watchdog is not None:
            self.watchdog.forget(rank)
        if status == INTERRUPTED and self.told not in ("end", "kill"):
            self.left = True
            self._pass_on(signal.SIGTERM)  # whichever it got, it may have ended before it could say so
            return
        explained = any(failure.rank == rank for failure in self.failures)
        if status != 0 and not explained and self.told not in ("end", "kill"):
            failure = Failure.of_exit(rank, status)
            self.failures.append(failure.within(position, others) if position else failure)

    def _in_schedule(self, rank: int) -> tuple[str, str]:
        """The position of a rank that died in a schedule, and those of the others; empty where it was in none."""
        if self.watchdog is None or not self.watchdog.scheduled(rank):
            return "", ""
        return self.watchdog.position(rank), self.watchdog.others_in_schedule(rank)

    def _act(self, server: ForkServer) -> None:
        now = time.monotonic()
        saves, self.saves = self.saves, 0
        if self.watchdog is not None and not self.failures and self.told is None:
            suspect = self.watchdog.look(now, self.activities)
            if suspect is not None:
                self.failures.append(Failure(suspect.rank, "died", suspect.how, now))
        began = cause(self.failures)
        if began is not None and began.kind == "lost" and self.asked is not None:
            began = None  # another rank has left already, as all were asked to
        waited = began is not None and now - min(failure.time for failure in self.failures) > SETTLE_S
        if began is not None and not self.shown and (began.kind != "lost" or waited or not self.alive):
            self._show(began)
            if self.alive and self.told not in ("end", "kill"):
                self._order("end", END_S)
        elif self.asked is not None and self.told is None and self.alive:
            _say(f"stopping: {self.config.wording.stopping}; once more ends them at once")
            self._order("stop", self.config.launch.grace)
        elif self.alive and self.told != "kill" and (self.at_once or now > self.kill_at):
            if not self.at_once and self.told == "stop":
                _say(self._did_not_end())
            server.signal(signal.SIGKILL)
            self.told, self.kill_at = "kill", now + END_S
        elif saves and self.told is None:
            self._send("save")

    def _did_not_end(self) -> str:
        where = {
            rank: self.watchdog.position(rank) if self.watchdog is not None else "" for rank in self.alive
        }
        ranks = ", ".join(f"{rank} ({at})" if at else str(rank) for rank, at in sorted(where.items()))
        return (
            f"did not end in the {self.config.launch.grace:g} s of launch.grace and is killed: worker {ranks}; "
            f"{self.config.wording.safe}"
        )

    def _order(self, order: str, patience: float) -> None:
        """Request the workers to end."""
        self._send(order)
        self.told = order
        self.kill_at = time.monotonic() + patience

    def _send(self, order: str) -> None:
        for end in self.alive.values():
            with contextlib.suppress(OSError):  # it has ended, and the server says so soon
                end.send_bytes(json.dumps({"do": order}).encode())

    def _show(self, failure: Failure) -> None:
        # After a request to stop, workers that have nothing to save leave one by one; a connection that is lost then
        # is no news.
        if self.asked is not None and failure.kind == "lost" and self.left:
            return
        self.shown = True
        _say(failure.render(self.config))

    def _verdict(self) -> int:
        began = cause(self.failures)
        return began.exit_code if began is not None else 0


def _preload(config: Launched, target: str) -> list[str]:
    """Modules that every worker needs: imported once, before the fork."""
    modules = [target.partition(":")[0]] if target.startswith("hyper_parallel.") else []
    if (family := config.model_type) is not None:
        modules.append(f"transformers.models.{family}.modeling_{family}")
    return modules


def _say(text: str) -> None:
    # If rank 0 redraws a line in place, the message replaces that line.
    sys.stderr.write((_BEGIN_LINE if _draws(sys.stderr) else "") + text + "\n")
    sys.stderr.flush()


def _give_back_terminal() -> None:
    """Erase a line that a killed rank 0 left partly drawn, and show the cursor again."""
    if _draws(sys.stdout):
        sys.stdout.write(_BEGIN_LINE + "\x1b[?25h")
        sys.stdout.flush()


def _draws(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
