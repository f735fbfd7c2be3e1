"""A worker of a group: makes its host object and executes the lists of instructions that arrive."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Sequence
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
            answer(end, host, worker.rank, message[1], pickle.loads(message[2]))
    leave = getattr(host, "close", None)
    if callable(leave):
        leave()


def answer(
    end: WorkerEnd, host: object, rank: int, number: int, instructions: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    """Execute a list and send its answer. Raises OSError when the engine has gone."""
    results: list[Any] = []
    place = 0
    for place, (operation, arguments) in enumerate(instructions):
        end.send(("at", number, place))
        try:
            with pulse.operation(operation, patient=False):
                results.append(method(host, operation)(**arguments))
        except Exception as error:
            log.exception("%s failed", operation)
            end.send(("failed", number, place, WorkerReport.of(rank, error)))
            return
    try:
        held = plain(results)
    except Exception as error:
        log.exception("the results cannot be sent")
        end.send(("failed", number, place, WorkerReport.of(rank, error)))
    else:
        end.send(("done", number, held))


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
