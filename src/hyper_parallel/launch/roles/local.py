"""Groups as processes of this machine, forked from one fork server.

One thread of the controller reads and writes all sockets, so that answers, deaths and deadlines are noticed whatever
the controller does. A worker's death closes its socket, which is noticed at once; a worker that is stopped, or hangs,
only misses its deadline.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import rendezvous
from hyper_parallel.launch.failure import Failure
from hyper_parallel.launch.forkserver import ForkServer, borrow, give_back
from hyper_parallel.launch.heartbeat import Beat, PositionBoard
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.roles.protocol import TARGET, EngineEnd, Future, packed
from hyper_parallel.launch.roles.queued_group import QueuedGroup, QueueEngine
from hyper_parallel.launch.watchdog import Activities

LEAVE_S = 3.0
"""Seconds that workers have to leave when the engine is closed, before SIGKILL."""
GONE_S = 10.0
"""Seconds in which a killed worker must be gone."""
_STATUS_S = 1.0
"""Seconds that a closed socket waits for its worker's exit status."""
_PATIENCE_S = 0.5
"""The longest sleep of the engine's thread. A much longer gap means that this process was suspended."""


class _Workers:
    """The processes of a group between two restarts."""

    def __init__(self, job: int, ends: Sequence[EngineEnd], reports: Sequence[Connection]) -> None:
        self.job = job
        self.ends = dict(enumerate(ends))
        self.reports = dict(enumerate(reports))
        self.pids: list[int] = []
        self.running = set(self.ends)
        self.closed: dict[int, float] = {}
        """When the socket of a worker was closed, before its exit status is known."""
        self.failures: dict[int, Failure] = {}
        self.beats: dict[int, Beat] = {}
        self.activities = Activities({})

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        for report in self.reports.values():
            report.close()


class LocalGroup(QueuedGroup):
    """A group of this machine's processes (`interface.Group`)."""

    def __init__(self, engine: LocalEngine, config: RoleLaunch) -> None:
        super().__init__(engine, config)
        self._workers: _Workers | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the processes are there."""
        workers = self._workers
        return list(workers.pids) if workers is not None else []

    def _situation(self, rank: int) -> str:
        workers = self._workers
        if workers is None:
            return ""
        if workers.activities(rank) == "stopped":
            return "suspended (SIGSTOP)"
        beat = workers.beats.get(rank)
        return f"at {beat.where}" if beat is not None and beat.where else ""


class LocalEngine(QueueEngine[LocalGroup]):
    """Starts groups as processes of this machine (`interface.Engine`)."""

    def __init__(self, *, spins: bool = True) -> None:
        """`spins`: as for `ForkServer`. Nothing is started yet."""
        super().__init__()
        self._spins = spins
        self._server: ForkServer | None = None
        self._jobs = 0
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._thread.start()

    def start(self, config: RoleLaunch, *, timeout_s: float) -> LocalGroup:
        """Start a group of workers."""
        self._admit(config.name)
        return self._register(LocalGroup(self, config), timeout_s)

    def begin(self, group: LocalGroup, timeout_s: float) -> Future:
        """Start the workers of a group that has none."""
        config, world = group.config, group.size
        group.log(0).parent.mkdir(parents=True, exist_ok=True)
        host = "127.0.0.1"
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(rendezvous.listen(host, 0)) if world > 1 else None
            port = listener.getsockname()[1] if listener is not None else 0
            places = [
                WorkerPlace("local", rank, world, rank, world, host, port, config.devices)
                for rank in range(world)
            ]
            board = PositionBoard.create(world)
            undo.callback(board.close)
            pairs = [socket.socketpair() for _ in places]
            for _, theirs in pairs:
                undo.callback(theirs.close)
            with self.noticed():
                server = self._running_server()
                self._jobs += 1
                reports = server.start(
                    places,
                    config,
                    TARGET,
                    _preload(config),
                    listener,
                    board.descriptor,
                    job=self._jobs,
                    calls=[theirs.fileno() for _, theirs in pairs],
                    logs=[str(group.log(rank)) for rank in range(world)],
                )
                group._workers = _Workers(self._jobs, [EngineEnd(ours) for ours, _ in pairs], reports)
                group.ready = group._queue.begin(timeout_s)
        return group.ready

    def kill(self, group: LocalGroup, why: str) -> None:
        """Kill a group's workers, fail its calls, and wait until the processes are gone."""
        with self.noticed():
            self._kill(group)
            group._queue.stop(why)
        self._await_end([group], GONE_S)
        with self._changed:
            workers, group._workers = group._workers, None
            if workers is not None:
                workers.close()
                if workers.running and self._server is not None:
                    # The server does not answer: it is stopped. Its end is that of all workers.
                    self._lose_server()

    def close(self) -> None:
        """Ask the workers to leave, then kill what is left."""
        with self._changed:
            if self._closed:
                return
            groups = list(self._groups.values())
            for group in groups:
                if group._workers is not None and group.alive:
                    for end in group._workers.ends.values():
                        end.put(packed(("end",)))
                group._queue.stop("the engine was closed")
        self._wake()
        self._await_end(groups, LEAVE_S)
        for group in groups:
            self.kill(group, "the engine was closed")
        with self._changed:
            self._closed = True
        self._wake()
        self._thread.join(GONE_S)
        if self._server is not None:
            give_back(self._server)
            self._server = None
        self._woken.close()
        self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _running_server(self) -> ForkServer:
        if self._server is not None and not self._server.alive:
            self._lose_server(self._server.why_it_ended())
        if self._server is None:
            self._server = borrow(self._spins)
        return self._server

    def _await_end(self, groups: Sequence[LocalGroup], patience: float) -> None:
        def gone() -> bool:
            return not any(group._workers is not None and group._workers.running for group in groups)

        with self._changed:
            self._changed.wait_for(gone, patience)

    def _kill(self, group: LocalGroup) -> None:
        if group._workers is not None and group._workers.running and self._server is not None:
            self._server.signal(signal.SIGKILL, group._workers.job)

    # The engine's thread.

    def _serve(self) -> None:
        slept_until = time.monotonic() + _PATIENCE_S
        while not self._closed:
            slept_until = self._turn(slept_until)

    def _turn(self, slept_until: float) -> float:
        """Wait, hear, act; when the next turn should begin at the latest."""
        with self._changed:
            poll = self._poll()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, slept_until - time.monotonic()) * 1000)}
        with self._changed:
            if self._closed:
                return slept_until
            self._hear(ready, time.monotonic() - slept_until)
            for group in self._active():
                self._act(group)
            self._changed.notify_all()
            times = [group._queue.next_look() for group in self._active()]
            return min([time.monotonic() + _PATIENCE_S, *times])

    def _active(self) -> list[LocalGroup]:
        return [group for group in self._groups.values() if group._workers is not None]

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._server is not None and not self._server.channel.closed:
            poll.register(self._server.channel, select.POLLIN)
        for group in self._active():
            assert group._workers is not None
            for end in group._workers.ends.values():
                if end.open:
                    poll.register(end, select.POLLIN | (select.POLLOUT if end.writes else 0))
            for report in group._workers.reports.values():
                if not report.closed:
                    poll.register(report, select.POLLIN)
        return poll

    def _hear(self, ready: set[int], overslept: float) -> None:
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        self._postpone(overslept)
        for group in self._active():
            workers = group._workers
            assert workers is not None
            for rank, end in workers.ends.items():
                if end.open and end.fileno() in ready:
                    self._hear_worker(group, workers, rank)
            for rank, report in workers.reports.items():
                if not report.closed and report.fileno() in ready:
                    self._hear_report(workers, rank, report)
        if (
            self._server is not None
            and not self._server.channel.closed
            and self._server.channel.fileno() in ready
        ):
            try:
                for event in self._server.events(0):
                    self._server_says(event)
            except LaunchError as error:
                self._lose_server(str(error))

    def _hear_worker(self, group: LocalGroup, workers: _Workers, rank: int) -> None:
        end = workers.ends[rank]
        end.flush()
        for message in end.receive():
            group._queue.heard(rank, message)
        if not end.open:
            workers.closed.setdefault(rank, time.monotonic())

    def _hear_report(self, workers: _Workers, rank: int, report: Connection) -> None:
        try:
            while report.poll():
                message = json.loads(report.recv_bytes())
                if message["event"] == "failed":
                    workers.failures[rank] = Failure(**message["failure"])
                elif message["event"] == "beat":
                    workers.beats[rank] = Beat(**message["beat"])
        except (EOFError, OSError):
            report.close()

    def _server_says(self, event: dict[str, Any]) -> None:
        # Signals to the server or to a worker say nothing here: the controller decides when its workers end.
        for group in self._active():
            workers = group._workers
            assert workers is not None
            if event.get("job") != workers.job:
                continue
            if event["event"] == "started":
                workers.pids = event["pids"]
                workers.activities = Activities(dict(enumerate(workers.pids)))
            elif event["event"] == "ended":
                rank = event["rank"]
                self._hear_worker(group, workers, rank)
                self._hear_report(workers, rank, workers.reports[rank])
                workers.running.discard(rank)
                self._worker_ended(group, workers, rank, Failure.of_exit(rank, event["status"]))

    def _worker_ended(self, group: LocalGroup, workers: _Workers, rank: int, failure: Failure) -> None:
        workers.closed.pop(rank, None)
        group._queue.ended(rank, workers.failures.get(rank, failure))

    def _act(self, group: LocalGroup) -> None:
        workers, queue = group._workers, group._queue
        assert workers is not None
        for rank, since in list(workers.closed.items()):
            if rank in workers.running and time.monotonic() > since + _STATUS_S:
                how = "closed its socket and does not end"
                self._worker_ended(group, workers, rank, Failure(rank, "died", how, since))
        # A worker may be ready before the server has said its process id.
        if (workers.pids or workers.closed or time.monotonic() >= queue.next_look()) and queue.look():
            self._kill(group)
        call = queue.to_send()
        if call is not None:
            for rank, one in enumerate(call.lists):
                workers.ends[rank].put(packed(("call", call.number, one)))

    def _lose_server(
        self, why: str = "the process that holds the workers did not answer and was killed"
    ) -> None:
        """The fork server has ended, and every worker with it; the next start begins another one."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for group in self._groups.values():
            if group._workers is not None:
                group._workers.running.clear()
            group._queue.stop(why)


def _preload(config: RoleLaunch) -> list[str]:
    """Modules that every worker needs: imported once, before the fork."""
    modules = [name.partition(":")[0] for name in (TARGET, config.host)]
    family = config.model_type
    return [
        *(name for name in modules if name.startswith("hyper_parallel.")),
        *([f"transformers.models.{family}.modeling_{family}"] if family is not None else []),
    ]
