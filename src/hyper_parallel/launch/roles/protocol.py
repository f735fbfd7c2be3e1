"""Protocol between a controller and its groups of workers: calls, futures, messages, and a worker's loop. No torch.

A group is a set of worker processes with their own default process group. A call sends each of them a list of
instructions; a worker executes its list in order on its host object and answers once, with a result for each
instruction. A group executes one call after another, in the order of the calls; groups run at the same time.

Every call has a deadline, at which its future ends with an error that names what did not answer. After a worker of a
group has died, crashed or missed a deadline, the group's workers are killed, and its calls fail until `restart`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hyper_parallel import errors
from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import GroupError, HyperParallelError, LaunchError, nearest
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.launch.worker import Worker, find_target
from hyper_parallel.launch.worker_failure import Failure
from hyper_parallel.socket_frames import framed, read_frame

_LATE_S = 30.0
"""Seconds after a deadline at which a wait ends although the engine said nothing: a defect, but no hang."""


@dataclass(frozen=True)
class Instruction:
    """One operation: the name of a method of the host object, and its keyword arguments as plain picklable data."""

    operation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Future:
    """The answer to a call, once it has arrived. Safe to use from several threads."""

    def __init__(self, described: str, deadline: float) -> None:
        """`described`: the call, for messages. `deadline`: on the monotonic clock."""
        self.described, self._deadline = described, deadline
        self._inner: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most `timeout_s` seconds (None: until its deadline); whether it is done."""
        wait_any([self], timeout_s)
        return self.done()

    def result(self) -> list[Any]:
        """For each rank the results of its instructions, in order. Waits until the call's deadline at most.

        Raises the HyperParallelError that an operation raised, with the group, rank, operation and step in front of
        its text; GroupError when a worker died, crashed or did not answer in time, or did so before.
        """
        if not self.wait():
            raise GroupError(f"{self.described}: the engine did not end the call at its deadline (a defect)")
        return self._inner.result()

    def finish(self, answer: list[Any] | BaseException) -> None:
        """The engine's side: the call has ended. A second end is ignored."""
        if self._inner.done():
            return
        if isinstance(answer, BaseException):
            self._inner.set_exception(answer)
        else:
            self._inner.set_result(answer)


def wait_any(futures: Iterable[Future], timeout_s: float | None = None) -> list[Future]:
    """The `futures` that are done, as soon as one is, and after `timeout_s` seconds at the latest (None: after the
    latest deadline). They keep their order; the list is empty if none is done.
    """
    waited = list(futures)
    if not waited:
        return []
    if timeout_s is None:
        timeout_s = max(one._deadline for one in waited) + _LATE_S - time.monotonic()
    inner = [one._inner for one in waited]
    while not any(one.done() for one in waited) and timeout_s > 0:
        # In slices: time in which this process was suspended is not counted, as the engine does not count it.
        concurrent.futures.wait(inner, min(timeout_s, 1.0), concurrent.futures.FIRST_COMPLETED)
        timeout_s -= 1.0
    return [one for one in waited if one.done()]


# Messages between a worker of a group and its engine, each a pickled tuple in a frame (`socket_frames`). To the worker:
#
#     ("call", number, list)               execute a list: pairs of an operation and its keyword arguments, pickled
#     ("end",)                             leave
#
# From the worker; each carries the number of its call, so that an answer is never taken for that of another call:
#
#     ("at", number, place)                begins the instruction at this place in its list
#     ("done", number, results)            the answer, pickled; call 0 is the making of the host object
#     ("failed", number, place, report)    the list ended there; `WorkerReport`


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A failed instruction."""

    failure: Failure
    error_class: str
    """The class of `hyper_parallel.errors` to raise in the controller."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> WorkerReport:
        """The report of an exception that was just caught."""
        return cls(failure=Failure.of(rank, error), error_class=error_class(error))


def error_class(error: BaseException) -> str:
    """The name of the most specific class of `hyper_parallel.errors` that the error is and a text alone can make."""
    for found in type(error).__mro__:
        if found.__module__ == errors.__name__ and found is not errors.WorkersFailedError:
            return found.__name__
    return HyperParallelError.__name__


class _Plain(pickle.Pickler):
    """Refuses what would make the controller import torch."""

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] == "torch":
            raise LaunchError(
                f"a worker's result holds a {kind.__module__}.{kind.__qualname__}, and a controller has no torch; "
                "return plain data, for instance with tolist()"
            )
        return NotImplemented


def plain(data: Any) -> bytes:
    """Data of a list or an answer, pickled. Raises LaunchError for a tensor, and what pickle raises."""
    file = io.BytesIO()
    _Plain(file, protocol=pickle.HIGHEST_PROTOCOL).dump(data)
    return file.getvalue()


def packed(message: tuple[Any, ...]) -> bytes:
    """A message, pickled."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


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
    end = worker.calls

    def send(*message: Any) -> None:
        end.sendall(framed(packed(message)))

    try:
        with pulse.operation("making the host object"):
            host = find_target(config.host)(config, worker)
    except Exception as error:
        send("failed", 0, 0, WorkerReport.of(worker.rank, error))
        raise
    with contextlib.suppress(OSError):  # the engine has gone
        send("done", 0, plain([]))
        while (body := read_frame(end)) is not None and (message := pickle.loads(body))[0] == "call":
            _, number, sent = message
            send(*answer(host, worker.rank, number, sent, partial(send, "at", number)))
    leave = getattr(host, "close", None)
    if callable(leave):
        leave()


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
