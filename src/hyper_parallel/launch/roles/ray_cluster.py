"""Ray: joining a cluster, or starting one here with a token, and a worker of a group as an actor."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import logs, rendezvous
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.roles.protocol import WorkerReport, answer, plain
from hyper_parallel.launch.worker import find_target, join
from hyper_parallel.launch.worker_failure import one_line

AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
REACH_S = 10.0
"""Seconds for the connection to a cluster that is to be joined."""


def load_ray() -> Any:
    """The module. Raises LaunchError where it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError(
            "the Ray engine needs Ray; install it with: pip install 'hyper-parallel[ray]'"
        ) from error
    return ray


def authenticate(address: str | None) -> None:
    """Keep authentication by token on, which Ray reads when it is imported. With its own cluster this process
    makes a token, if the user has none: otherwise Ray writes one into the home folder.
    """
    mode = os.environ.setdefault(AUTH_MODE, "token")
    if address is None and mode != "token":
        raise LaunchError(
            f"{AUTH_MODE}={mode} would let everybody who reaches this machine's ports run programs in the Ray cluster; "
            "unset it"
        )
    has_file = (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN_PATH" in os.environ
    if address is None and not has_file and "ray" not in sys.modules:
        os.environ.setdefault(AUTH_TOKEN, secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def connect(ray: Any, address: str | None, cpus: int | None) -> bool:
    """Join the cluster at an address, or start one here; whether this process was not connected before. Raises
    LaunchError.
    """
    if ray.is_initialized():
        return False
    # "local": without an address Ray joins a cluster that was started here before, if it finds a trace of one.
    local = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    own = local if address is None else {"address": address}
    if address is not None:
        _reach(ray, address)
    try:
        ray.init(**own, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        where = "start Ray on this machine" if address is None else f"join the Ray cluster at {address}"
        raise LaunchError(f"cannot {where}: {type(error).__name__}: {one_line(str(error))[:300]}") from error
    return True


def _reach(ray: Any, address: str) -> None:
    """Raise LaunchError unless something listens there: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # one of Ray's own forms, such as auto
    host = host.strip("[]")
    if host in ("127.0.0.1", "localhost", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray reads it
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise LaunchError(
            f"cannot join the Ray cluster at {address}: nothing answers at {host}:{port} ({error.strerror or error}); "
            "start it there with `ray start --head`, or give the address that it printed"
        ) from error


# A worker of a group as a Ray actor: joins its group's process group and executes lists of instructions.
#
# Lists run on one thread of the actor; `position` and `watch` on two others, so that they answer while a list runs.


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
