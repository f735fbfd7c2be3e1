"""Joining a Ray cluster, or starting one on this machine, with authentication by token."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.failure import one_line

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
    """Keep authentication by token on, which Ray reads when it is imported. With a cluster of its own this process
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
