"""The fork server: a process that loads torch once and forks the workers of a run.

`worker_supervisor.py` starts it and communicates with it over one socket, in JSON. Workers that are started together
are a job; several may run at once:

    ← {"do": "start", "job": j, "places": [...], ...} and then the open files   → {"event": "started", "job": j}
    ← {"do": "signal", "job": j, "number": n}  all workers of job j that are alive get signal n
                                               → {"event": "ended", "job": j, "rank": r, "status": s}

It never computes (a child forked after OpenMP has run hangs) and never touches a device. It and the workers have a
separate session, so that a Ctrl-C at the terminal reaches the command only; they die with the command. A signal that
still reaches it (a service manager and Slurm signal every process of a job) is forwarded to the command, which decides:

                                               → {"event": "signal", "number": n}
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from hyper_parallel.launch import stop
from hyper_parallel.proc import die_with

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "hyper_parallel.compat",
    "hyper_parallel.config",
    "hyper_parallel.launch.worker",
)
PASSED_ON = (*stop.STOPS, stop.SAVE)


@dataclass(frozen=True)
class _Job:
    message: dict[str, Any]
    terminal: tuple[int, int]
    reports: list[int]
    calls: list[int]
    board: int
    listener: int | None

    def close(self) -> None:
        for descriptor in (
            *self.terminal,
            *self.reports,
            *self.calls,
            self.board,
            *([] if self.listener is None else [self.listener]),
        ):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def main(channel_descriptor: int, parent: int) -> None:
    """Serve until the other end of the channel is closed, then end all workers."""
    die_with(parent)
    channel = Connection(channel_descriptor)
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for one in (signal.SIGCHLD, *PASSED_ON):
        if one in (signal.SIGCHLD, signal.SIGINT) or signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, lambda number, frame: None)
    # The command has blocked them around the start of this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # the collector would touch, and so copy, the pages that workers share

    workers: dict[int, tuple[int, int]] = {}  # process id to job and rank
    try:
        while True:
            ready = wait([channel, woken])
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    for number in set(woken.recv(4096)) & set(PASSED_ON):
                        channel.send_bytes(json.dumps({"event": "signal", "number": number}).encode())
                _reap(workers, channel)
            if channel in ready:
                message = json.loads(channel.recv_bytes())
                if message["do"] == "start":
                    _start(message, workers, channel)
                else:
                    for pid, (job, _) in workers.items():
                        if job == message["job"]:
                            os.kill(pid, message["number"])
    except (EOFError, ConnectionError):
        pass  # the command has gone
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def _reap(workers: dict[int, tuple[int, int]], channel: Connection) -> None:
    for pid, (job, rank) in list(workers.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            del workers[pid]
            code = os.waitstatus_to_exitcode(status)
            event = {"event": "ended", "job": job, "rank": rank, "status": code}
            channel.send_bytes(json.dumps(event).encode())


def _start(message: dict[str, Any], workers: dict[int, tuple[int, int]], channel: Connection) -> None:
    places = message["places"]
    job = _Job(
        message,
        (recv_handle(channel), recv_handle(channel)),
        [recv_handle(channel) for _ in places],
        [recv_handle(channel) for _ in places] if message["calls"] else [],
        recv_handle(channel),
        recv_handle(channel) if message["listens"] else None,
    )
    for name in message["preload"]:
        # What cannot be imported here fails in the worker too, which can say so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    server = os.getpid()
    # A worker unblocks them once its control thread runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pids = []
    for index, place in enumerate(places):
        pid = os.fork()
        if pid == 0:
            _become_worker(job, index, server, channel)
        workers[pid] = message["job"], place["rank"]
        pids.append(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    job.close()
    channel.send_bytes(json.dumps({"event": "started", "job": message["job"], "pids": pids}).encode())


def _become_worker(job: _Job, index: int, server: int, channel: Connection) -> None:
    """The child's side of the fork; never returns."""
    code = 1
    try:
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        os.environ.clear()
        os.environ.update(job.message["environ"])
        os.chdir(job.message["folder"])
        sys.path[:] = job.message["path"]
        code = _work(job, index)
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads of torch and of trackers may never end: leave without waiting for them.
        os._exit(code)


def _work(job: _Job, index: int) -> int:
    import atexit

    from hyper_parallel.errors import LaunchError
    from hyper_parallel.launch import logs
    from hyper_parallel.launch.control import CommandLink, ControlThread
    from hyper_parallel.launch.heartbeat import PositionBoard, pulse
    from hyper_parallel.launch.rendezvous import WorkerPlace
    from hyper_parallel.launch.worker import work
    from hyper_parallel.launch.worker_failure import Failure

    place = WorkerPlace(**job.message["places"][index])
    link = CommandLink(Connection(os.dup(job.reports[index])))
    driven = job.message["calls"]  # by a controller
    calls = socket.socket(fileno=os.dup(job.calls[index])) if driven else None
    terminal = (os.dup(job.terminal[0]), os.dup(job.terminal[1])) if place.rank == 0 and not driven else None
    listener = (
        socket.socket(fileno=os.dup(job.listener)) if job.listener is not None and place.rank == 0 else None
    )
    board = PositionBoard(job.board)
    job.close()

    def report(failure: Failure, store: object) -> None:
        link.tell({"event": "failed", "failure": asdict(failure)})

    module, _, name = job.message["config_class"].partition(":")
    config = getattr(importlib.import_module(module), name).model_validate_json(job.message["config"])
    files = job.message["logs"]
    log = Path(files[index]) if files else logs.path_of(config.out, place.rank)
    with ControlThread(link, obeys=not driven), contextlib.ExitStack() as undo:
        try:
            undo.enter_context(logs.recording(log, terminal, config.wording.kept))
        except LaunchError as error:
            report(failure := Failure.of(place.rank, error), None)
            return failure.exit_code
        pulse.write_to(board.slot(index))
        code = work(place, config, job.message["target"], report, listener, calls=calls)
        atexit._run_exitfuncs()  # trackers flush what they hold
        return code
