"""The interface between a controller and its groups of workers: start, call, future, kill. No torch.

A group is a set of worker processes with their own default process group. A call sends each of them a list of
instructions; a worker executes its list in order on its host object and answers once, with a result for each
instruction. A group executes one call after another, in the order of the calls; groups run at the same time.

Every call has a deadline, at which its future ends with an error that names what did not answer. After a worker of a
group has died, crashed or missed a deadline, the group's workers are killed, and its calls fail until `restart`.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hyper_parallel.config.role_launch import RoleLaunch
from hyper_parallel.errors import GroupError

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
    """Those of `futures` that are done, as soon as one is, and after `timeout_s` seconds at the latest (None: after the
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


class Group(Protocol):
    """Workers with one default process group. Its methods may be called from several threads."""

    @property
    def name(self) -> str:
        """Of the config."""

    @property
    def size(self) -> int:
        """The number of workers."""

    @property
    def ready(self) -> Future:
        """Done when all workers have made their host object, or could not; its result says nothing."""

    @property
    def alive(self) -> bool:
        """Whether calls can succeed: all workers are there, and none has failed its group. Also while it starts."""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the processes are there."""

    def call(self, instructions: Sequence[Instruction], *, timeout_s: float, what: str = "") -> Future:
        """Send every rank the same list. Returns at once; calls wait for their turn in the group's queue.

        `timeout_s`: seconds from now, that wait included, after which the future ends. `what`: the step, for messages.
        """

    def call_each(
        self, instructions: Sequence[Sequence[Instruction]], *, timeout_s: float, what: str = ""
    ) -> Future:
        """`call` with a list for each rank, in their order. Lists may differ in length."""

    def kill(self) -> None:
        """Kill the workers; calls that are open fail. The group can be restarted."""

    def restart(self, *, timeout_s: float) -> Future:
        """Kill what is left and start anew with the same config: new processes, a new process group, new host objects.

        Returns the new `ready`, which ends within `timeout_s` seconds.
        """


class Engine(Protocol):
    """Starts groups. A context manager: no worker outlives it, nor the process that made it."""

    def start(self, config: RoleLaunch, *, timeout_s: float) -> Group:
        """Start a group; returns before its workers are there, so that groups start at the same time.

        `timeout_s`: seconds until all of its host objects must have been made. Raises LaunchError when it cannot be
        started; what fails later is raised by `Group.ready`.
        """

    def close(self) -> None:
        """End all workers; a second call does nothing."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *_: object) -> None: ...
