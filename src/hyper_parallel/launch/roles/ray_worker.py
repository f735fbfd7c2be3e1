"""A worker of a group as a Ray actor: joins its group's process group and executes lists of instructions.

Lists run on one thread of the actor; `position` and `watch` on two others, so that they answer while a list runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from hyper_parallel.config.role_launch import RoleLaunch
from hyper_parallel.launch import logs, rendezvous
from hyper_parallel.launch.launcher_env import WorkerPlace
from hyper_parallel.launch.roles.messages import WorkerReport, plain
from hyper_parallel.launch.roles.serve import answer
from hyper_parallel.launch.worker import find_target, join


class RayWorker:
    """The actor."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._host: object = None
        self._rank = 0
        self._at: tuple[Any, ...] = ("at", 0, 0)
        self._undo = contextlib.ExitStack()

    def process(self) -> tuple[str, str, int]:
        """This worker's node, its address, and its process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def listen(self, host: str) -> int:
        """On rank 0: bind the port where the group's workers meet."""
        self._listener = rendezvous.listen(host, 0)
        return int(self._listener.getsockname()[1])

    def begin(self, place: WorkerPlace, config: str, log: str) -> tuple[Any, ...]:
        """Join the process group and make the host object; the message of call 0. `config`: JSON."""
        self._rank = place.rank
        try:
            self._undo.enter_context(logs.recording(Path(log), None))
            role = RoleLaunch.model_validate_json(config)
            worker = join(place, role, self._listener)
            self._host = find_target(role.host)(role, worker)
        except Exception as error:
            return ("failed", 0, 0, WorkerReport.of(place.rank, error))
        return ("done", 0, plain([]))

    def call(self, number: int, sent: bytes) -> tuple[Any, ...]:
        """Execute a list; the message that answers it."""

        def at(place: int) -> None:
            self._at = ("at", number, place)

        return answer(self._host, self._rank, number, sent, at)

    def position(self) -> tuple[Any, ...]:
        """The message that says which instruction runs."""
        return self._at

    def watch(self) -> None:
        """Never returns: its reference fails when this process ends."""
        threading.Event().wait()


def kill_process(pid: int) -> None:
    """SIGKILL to a worker on this node: a stopped process does not hear Ray's request to end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
