"""Run of a target on every rank: local workers are started and supervised here; a launcher's worker joins the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import PREFIX, LaunchError
from hyper_parallel.launch import rendezvous
from hyper_parallel.launch.external_launcher import run_joined
from hyper_parallel.launch.rendezvous import WorkerPlace, detect, split_address, workers_of
from hyper_parallel.launch.run_folder import RunFolder, run_lock
from hyper_parallel.launch.stop import SAVE, STOPS, handling
from hyper_parallel.launch.worker_failure import Failure, cause, settles_at, watch_steps
from hyper_parallel.launch.worker_supervisor import LocalWorkers, fork_server
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
    """The state of one run: failures are its workers', pending requests are here."""

    def __init__(self, config: Launched) -> None:
        self.config = config
        self.asked: float | None = None  # when a signal first asked the run to stop
        self.at_once = False  # Ctrl-C came again
        self.saves = 0  # how often a signal asked for a checkpoint
        self.suspended = False  # Ctrl-Z
        self.told: str | None = None  # the last order to the workers that ends them
        self.kill_at = float("inf")
        self.shown = False
        self.left = False  # some worker ended because it was asked to before it had anything to save

    def run(self, places: Sequence[WorkerPlace], target: str, listener: socket.socket | None) -> int:
        handlers = {
            **dict.fromkeys(STOPS, lambda number, frame: self._ask(number)),
            SAVE: lambda number, frame: self._ask(number),
            signal.SIGTSTP: lambda number, frame: setattr(self, "suspended", True),
        }
        workers: LocalWorkers | None = None
        with handling(handlers):
            # Beside a budget's copies a team of threads has not all cores to itself.
            server = fork_server(spins=self.config.strategy.memory.device is None)
            try:
                workers = server.start(places, self.config, target, listener, signalled=self._hear_signal)
                if places[0].world > 1:
                    workers.watch(self.config.launch.timeout, others=len(places) < places[0].world)
                while workers.alive:
                    for event in server.events(timeout=0.1):
                        if event["event"] == "signal":
                            self._pass_on(event["number"])
                        elif (ended := workers.event(event)) is not None:
                            self._ended(workers, *ended)
                    for rank in list(workers.alive):
                        workers.hear(rank)
                    if self.suspended:
                        self._suspend(workers)
                    if self.asked is not None and not workers.pids:
                        break  # nothing to save yet
                    self._act(workers)
            except LaunchError as error:
                started = workers is not None and bool(workers.pids)
                if self.asked is not None and not started:
                    return INTERRUPTED
                if not started:
                    raise
                _say(f"{PREFIX}{error}; {self.config.wording.resume}")
                return 1
            finally:
                if workers is not None and workers.alive:
                    server.close()  # and every worker with it
                    workers.close()
                if self.asked is not None or (workers is not None and workers.failures):
                    _give_back_terminal()
        if self.asked is not None and not self.shown:
            return INTERRUPTED
        began = cause(workers.failures)
        return began.exit_code if began is not None else 0

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

    def _hear_signal(self, number: int) -> None:
        """Handle a signal that a worker got."""
        if number != SAVE:  # one rank's request to save reaches the others in the step's reduction
            self._pass_on(number)

    def _suspend(self, workers: LocalWorkers) -> None:
        """Ctrl-Z: stop and continue the workers (not part of the terminal's job) together with this process."""
        self.suspended = False
        workers.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        workers.signal(signal.SIGCONT)

    def _ended(self, workers: LocalWorkers, rank: int, status: int) -> None:
        failure = workers.end(rank, status)
        if self.told in ("end", "kill"):
            return
        if status == INTERRUPTED:
            self.left = True
            self._pass_on(signal.SIGTERM)  # whichever it got, it may have ended before it could say so
        elif status != 0 and failure not in workers.failures:
            workers.failures.append(failure)

    def _act(self, workers: LocalWorkers) -> None:
        now = time.monotonic()
        saves, self.saves = self.saves, 0
        failures, watchdog = workers.failures, workers.watchdog
        if watchdog is not None and not failures and self.told is None:
            suspect = watchdog.look(now, workers.activities)
            if suspect is not None:
                failures.append(Failure(suspect.rank, "died", suspect.how, now))
        began = cause(failures)
        if began is not None and began.kind == "lost" and self.asked is not None:
            began = None  # another rank has left already, as all were asked to
        if (
            began is not None
            and not self.shown
            and (began.kind != "lost" or now > settles_at(failures) or not workers.alive)
        ):
            self._show(began)
            if workers.alive and self.told not in ("end", "kill"):
                self._order(workers, "end", END_S)
        elif self.asked is not None and self.told is None and (workers.alive or not self.left):
            # Also where a busy machine let this process hear of the request and of the workers' ends at once.
            _say(f"stopping: {self.config.wording.stopping}; once more ends them at once")
            self._order(workers, "stop", self.config.launch.grace)
        elif workers.alive and self.told != "kill" and (self.at_once or now > self.kill_at):
            if not self.at_once and self.told == "stop":
                _say(self._did_not_end(workers))
            workers.signal(signal.SIGKILL)
            self.told, self.kill_at = "kill", now + END_S
        elif saves and self.told is None:
            workers.order("save")

    def _did_not_end(self, workers: LocalWorkers) -> str:
        watchdog = workers.watchdog
        where = {
            rank: watchdog.position(rank) if watchdog is not None else "" for rank in sorted(workers.alive)
        }
        ranks = ", ".join(f"{rank} ({at})" if at else str(rank) for rank, at in where.items())
        return (
            f"did not end in the {self.config.launch.grace:g} s of launch.grace and is killed: worker {ranks}; "
            f"{self.config.wording.safe}"
        )

    def _order(self, workers: LocalWorkers, order: str, patience: float) -> None:
        """Request the workers to end."""
        workers.order(order)
        self.told = order
        self.kill_at = time.monotonic() + patience

    def _show(self, failure: Failure) -> None:
        # After a request to stop, workers that have nothing to save leave one by one; a connection that is lost then
        # is no news.
        if self.asked is not None and failure.kind == "lost" and self.left:
            return
        self.shown = True
        _say(failure.render(self.config))


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
