"""A worker of a group: makes its host object and executes the lists of instructions that arrive."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from hyper_parallel.config.role_launch import RoleLaunch
from hyper_parallel.errors import LaunchError, nearest
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.launch.roles.messages import WorkerEnd, WorkerReport, plain
from hyper_parallel.launch.worker import Worker, find_target

log = logging.getLogger(__name__)

TARGET = f"{__name__}:serve"


def serve(config: RoleLaunch, worker: Worker) -> None:
    """The target of a group's workers: serve until the controller ends them.

    Raises what making the host object raises. An instruction that raises ends its list, not the worker.
    """
    if worker.calls is None:
        raise LaunchError(
            f"{TARGET} serves a controller; start it by an engine of hyper_parallel.launch.roles"
        )
    end = WorkerEnd(worker.calls)
    try:
        with pulse.operation("making the host object"):
            host = find_target(config.host)(config, worker)
    except Exception as error:
        end.send(("failed", 0, 0, WorkerReport.of(worker.rank, error)))
        raise
    with contextlib.suppress(OSError):  # the engine has gone
        end.send(("done", 0, plain([])))
        while (message := end.receive()) is not None and message[0] == "call":
            number = message[1]
            end.send(answer(host, worker.rank, number, message[2], partial(_report_place, end, number)))
    leave = getattr(host, "close", None)
    if callable(leave):
        leave()


def _report_place(end: WorkerEnd, number: int, place: int) -> None:
    end.send(("at", number, place))


def answer(host: object, rank: int, number: int, sent: bytes, at: Callable[[int], None]) -> tuple[Any, ...]:
    """Execute a list, as it was sent, and return the message that answers it. `at` is called as each one begins."""
    results: list[Any] = []
    place = 0
    try:
        for place, (operation, arguments) in enumerate(pickle.loads(sent)):
            at(place)
            with pulse.operation(operation, patient=False):
                results.append(method(host, operation)(**arguments))
        return ("done", number, plain(results))
    except Exception as error:
        log.exception("instruction %d failed", place + 1)
        return ("failed", number, place, WorkerReport.of(rank, error))


def method(host: object, operation: str) -> Any:
    """The method of this name. Raises LaunchError when the host object has none, with the nearest name."""
    found = None if operation.startswith("_") else getattr(host, operation, None)
    if not callable(found):
        known = [name for name in dir(host) if not name.startswith("_") and callable(getattr(host, name))]
        raise LaunchError(
            f"{type(host).__name__} has no operation {operation!r}"
            + (nearest(operation, known) or f"; it has {', '.join(known)}")
        )
    return found
