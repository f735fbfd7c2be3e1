"""Groups as processes of this machine, forked from one fork server.

The engine's thread reads and writes all sockets. A worker's death closes its socket, which is noticed at once; a worker
that is stopped, or hangs, only misses its deadline.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import rendezvous
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.roles.call_queue import Call
from hyper_parallel.launch.roles.engine import Engine, Group
from hyper_parallel.launch.roles.protocol import TARGET, Future, packed
from hyper_parallel.launch.worker_failure import Failure
from hyper_parallel.launch.worker_supervisor import ForkServer, LocalWorkers, borrow, give_back
from hyper_parallel.socket_frames import FrameEnd

LEAVE_S = 3.0
"""Seconds that workers have to leave when the engine is closed, before SIGKILL."""
GONE_S = 10.0
"""Seconds in which a killed worker must be gone."""
_STATUS_S = 1.0
"""Seconds that a closed socket waits for its worker's exit status."""


class LocalGroup(Group):
    """A group of this machine's processes."""

    _engine: LocalEngine

    def __init__(self, engine: LocalEngine, config: RoleLaunch) -> None:
        super().__init__(engine, config)
        self._workers: LocalWorkers | None = None
        self._ends: dict[int, FrameEnd] = {}
        """The workers' sockets for calls."""
        self._hung_up: dict[int, float] = {}
        """When the socket of a worker was closed, before its exit status is known."""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the processes are there."""
        workers = self._workers
        return list(workers.pids.values()) if workers is not None else []

    def _begin(self, timeout_s: float) -> Future:
        self.log(0).parent.mkdir(parents=True, exist_ok=True)
        host, world = "127.0.0.1", self.size
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(rendezvous.listen(host, 0)) if world > 1 else None
            port = listener.getsockname()[1] if listener is not None else 0
            pairs = [socket.socketpair() for _ in range(world)]
            for _, theirs in pairs:
                undo.callback(theirs.close)
            with self._engine.noticed():
                server, job = self._engine.new_job()
                self._workers = server.start(
                    [
                        WorkerPlace("local", rank, world, rank, world, host, port, self.config.devices)
                        for rank in range(world)
                    ],
                    self.config,
                    TARGET,
                    listener,
                    preload=[self.config.host],
                    job=job,
                    calls=[theirs.fileno() for _, theirs in pairs],
                    logs=[str(self.log(rank)) for rank in range(world)],
                )
                self._ends = {rank: FrameEnd(ours) for rank, (ours, _) in enumerate(pairs)}
                self._hung_up.clear()
                self.ready = self._queue.begin(timeout_s)
        return self.ready

    def _end(self, why: str) -> None:
        """Kill the workers, fail the calls, and wait until the processes are gone."""
        with self._engine.noticed():
            self._kill_workers()
            self._queue.stop(why)
        self._engine.await_end([self], GONE_S)
        with self._engine.noticed():
            if self.has_processes:
                # The server does not answer: it is stopped. Its end is that of all workers.
                self._engine.lose_server()
            self.lose()

    def _kill_workers(self) -> None:
        if self._workers is not None and self._workers.alive:
            self._workers.signal(signal.SIGKILL)

    def _send(self, call: Call) -> None:
        for rank, sent in enumerate(call.lists):
            self._ends[rank].put(packed(("call", call.number, sent)))

    def _situation(self, rank: int) -> str:
        workers = self._workers
        if workers is None:
            return ""
        if workers.activities(rank) == "stopped":
            return "suspended (SIGSTOP)"
        beat = workers.beats.get(rank)
        return f"at {beat.where}" if beat is not None and beat.where else ""

    def _turn(self) -> None:
        workers, queue = self._workers, self._queue
        assert workers is not None
        for rank, since in list(self._hung_up.items()):
            if rank in workers.alive and time.monotonic() > since + _STATUS_S:
                self._hung_up.pop(rank)
                how = "closed its socket and does not end"
                queue.ended(rank, workers.said(rank) or Failure(rank, "died", how, since))
        # A worker may be ready before the server has said its process id.
        if workers.pids or self._hung_up or time.monotonic() >= queue.next_look():
            super()._turn()

    # For the engine, with its lock.

    @property
    def has_processes(self) -> bool:
        """Whether there are processes whose exit status is not known yet."""
        return self._workers is not None and bool(self._workers.alive)

    def leave(self) -> None:
        """Ask the workers to leave."""
        if self.alive:
            for end in self._ends.values():
                end.put(packed(("end",)))

    def lose(self) -> None:
        """The workers have ended, or are ended otherwise: there are none now."""
        for end in self._ends.values():
            end.close()
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def register(self, poll: select.poll) -> None:
        """Have `poll` wait for what the workers say, and for room for what is sent to them."""
        if self._workers is None:
            return
        for end in self._ends.values():
            if end.open:
                poll.register(end, select.POLLIN | (select.POLLOUT if end.writes else 0))
        for report in self._workers.alive.values():
            if not report.closed:
                poll.register(report, select.POLLIN)

    def hear(self, ready: set[int]) -> None:
        """Take in what workers say whose sockets and pipes are among the descriptors `ready`."""
        workers = self._workers
        if workers is None:
            return
        for rank, end in self._ends.items():
            if end.open and end.fileno() in ready:
                self._hear_answers(rank)
        for rank, report in workers.alive.items():
            if not report.closed and report.fileno() in ready:
                workers.hear(rank)

    def _hear_answers(self, rank: int) -> None:
        end = self._ends[rank]
        end.flush()
        for body in end.receive():
            self._queue.heard(rank, pickle.loads(body))
        if not end.open:
            self._hung_up.setdefault(rank, time.monotonic())

    def server_says(self, event: dict[str, Any]) -> None:
        """Take in an event of the fork server.

        Signals to it or to a worker say nothing here: the controller decides when its workers end.
        """
        if self._workers is not None and (ended := self._workers.event(event)) is not None:
            rank, status = ended
            self._hear_answers(rank)
            self._hung_up.pop(rank, None)
            self._queue.ended(rank, self._workers.end(rank, status))


class LocalEngine(Engine):
    """Starts groups as processes of this machine."""

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

    def close(self) -> None:
        """Ask the workers to leave, then kill what is left."""
        with self._changed:
            if self._closed:
                return
            groups = self._local
            for group in groups:
                group.leave()
                group._queue.stop("the engine was closed")
        self._wake()
        self.await_end(groups, LEAVE_S)
        for group in groups:
            group._end("the engine was closed")
        with self._changed:
            self._closed = True
        self._wake()
        self._thread.join(GONE_S)
        if self._server is not None:
            give_back(self._server)
            self._server = None
        self._woken.close()
        self._waker.close()

    @property
    def _local(self) -> list[LocalGroup]:
        return [group for group in self._groups.values() if isinstance(group, LocalGroup)]

    # For groups.

    def new_job(self) -> tuple[ForkServer, int]:
        """A fork server, and the number of a new job there. The caller has the engine's lock."""
        if self._server is not None and not self._server.alive:
            self.lose_server(self._server.why_it_ended())
        if self._server is None:
            self._server = borrow(self._spins)
        self._jobs += 1
        return self._server, self._jobs

    def lose_server(
        self, why: str = "the process that holds the workers did not answer and was killed"
    ) -> None:
        """The fork server has ended, and every worker with it; the next start begins another one."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for group in self._local:
            group.lose()
            group._queue.stop(why)

    def await_end(self, groups: Sequence[LocalGroup], patience: float) -> None:
        """Wait until no process of these groups is left, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not any(group.has_processes for group in groups), patience)

    # The engine's thread.

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _wait(self, until: float) -> set[int]:
        """The descriptors that are ready."""
        poll = select.poll()
        with self._changed:
            poll.register(self._woken, select.POLLIN)
            if self._server is not None and not self._server.channel.closed:
                poll.register(self._server.channel, select.POLLIN)
            for group in self._local:
                group.register(poll)
        return {descriptor for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}

    def _hear(self, arrived: set[int]) -> None:
        if self._woken.fileno() in arrived:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        for group in self._local:
            group.hear(arrived)
        server = self._server
        if server is None or server.channel.closed or server.channel.fileno() not in arrived:
            return
        try:
            for event in server.events(0):
                for group in self._local:
                    group.server_says(event)
        except LaunchError as error:
            self.lose_server(str(error))
