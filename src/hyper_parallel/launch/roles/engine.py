"""Groups and engines, without what depends on how workers run: a group's queue, an engine's loop on its thread."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.roles.call_queue import Call, CallQueue, sent_lists
from hyper_parallel.launch.roles.protocol import Future, Instruction

SUSPENDED_S = 2.0
"""Seconds by which the engine's thread must oversleep to conclude that this process was suspended."""
_PATIENCE_S = 0.5
"""The longest sleep of the engine's thread. A much longer gap means that this process was suspended."""

AnyGroup = TypeVar("AnyGroup", bound="Group")


class Engine(ABC):
    """Starts groups. A context manager: no worker outlives it, nor the process that made it.

    One thread serves the queues of all groups, so that answers, deaths and deadlines are noticed whatever the
    controller does.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._thread = threading.Thread(target=self._guarded, name="roles", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def start(self, config: RoleLaunch, *, timeout_s: float) -> Group:
        """Start a group; returns before its workers are there, so that groups start at the same time.

        `timeout_s`: seconds until all of its host objects must have been made. Raises LaunchError when it cannot be
        started; what fails later is raised by `Group.ready`.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers; a second call does nothing."""

    @abstractmethod
    def _wake(self) -> None:
        """Have the thread look again."""

    @abstractmethod
    def _wait(self, until: float) -> Any:
        """Wait for what workers say, at the latest until that time of the monotonic clock; what `_hear` needs."""

    @abstractmethod
    def _hear(self, arrived: Any) -> None:
        """Take in what arrived. Called with the engine's lock."""

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Inside, the caller has the engine's lock; afterwards the engine's thread looks again."""
        with self._changed:
            yield
        self._wake()

    def check_open(self) -> None:
        """Raise LaunchError when the engine starts nothing any more."""
        if self._closed or not self._thread.is_alive():
            raise LaunchError("the engine is closed; make another one")

    def _admit(self, name: str) -> None:
        """Raise LaunchError where no group of this name can be started."""
        with self._changed:
            self.check_open()
            if name in self._groups:
                raise LaunchError(
                    f"there is a group {name!r} already; restart it, or name the new one otherwise"
                )

    def _register(self, group: AnyGroup, timeout_s: float) -> AnyGroup:
        with self._changed:  # before its workers can say anything
            self._groups[group.name] = group
        try:
            group._begin(timeout_s)
        except BaseException:
            with self._changed:
                del self._groups[group.name]
            raise
        return group

    # The engine's thread.

    def _guarded(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a wait must not depend on a thread that is gone
            with self._changed:
                for group in self._groups.values():
                    group._queue.stop(f"the engine's thread failed with {type(error).__name__}: {error}")
            raise

    def _serve(self) -> None:
        due = time.monotonic() + _PATIENCE_S
        while not self._closed:
            arrived = self._wait(due)
            with self._changed:
                if self._closed:
                    return
                overslept = time.monotonic() - due
                if overslept > SUSPENDED_S:  # deadlines do not run while this process is suspended
                    for group in self._groups.values():
                        group._queue.postpone(overslept)
                self._hear(arrived)
                for group in self._groups.values():
                    if group._workers is not None:
                        group._turn()
                self._changed.notify_all()
                times = [
                    group._queue.next_look() for group in self._groups.values() if group._workers is not None
                ]
                due = min([time.monotonic() + _PATIENCE_S, *times])


class Group(ABC):
    """Workers with one default process group. Its methods may be called from several threads."""

    _workers: object = None
    """The processes between a start and its end."""

    def __init__(self, engine: Engine, config: RoleLaunch, exact: bool = True) -> None:
        """`exact`: as for `CallQueue`."""
        self.config = config
        self.name, self.size = config.name, config.effective_strategy.world
        self._engine = engine
        self._queue = CallQueue(self.name, self.size, self.log, self._situation, exact)
        self.ready: Future
        """Done when all workers have made their host object, or could not; its result says nothing."""

    @property
    def alive(self) -> bool:
        """Whether calls can succeed: all workers are there, and none has failed its group. Also while it starts."""
        return self._queue.broken is None

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the processes are there."""

    def log(self, rank: int) -> Path:
        """The log of a worker."""
        return Path(self.config.out).absolute() / "logs" / f"{self.name}-{rank}.log"

    def call(self, instructions: Sequence[Instruction], *, timeout_s: float, what: str = "") -> Future:
        """Send every rank the same list. Returns at once; calls wait for their turn in the group's queue.

        `timeout_s`: seconds from now, that wait included, after which the future ends. `what`: the step, for messages.
        """
        return self.call_each([instructions] * self.size, timeout_s=timeout_s, what=what)

    def call_each(
        self, instructions: Sequence[Sequence[Instruction]], *, timeout_s: float, what: str = ""
    ) -> Future:
        """`call` with a list for each rank, in their order. Lists may differ in length."""
        sent = sent_lists(self.name, self.size, instructions)
        with self._engine.noticed():
            return self._queue.submit(instructions, sent, timeout_s, what)

    def kill(self) -> None:
        """Kill the workers; calls that are open fail. The group can be restarted."""
        self._end("it was killed by request")

    def restart(self, *, timeout_s: float) -> Future:
        """Kill what is left and start anew with the same config: new processes, a new process group, new host objects.

        Returns the new `ready`, which ends within `timeout_s` seconds.
        """
        self._engine.check_open()
        self._end("it was restarted")
        return self._begin(timeout_s)

    @abstractmethod
    def _begin(self, timeout_s: float) -> Future:
        """Start the workers of a group that has none; the new `ready`."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """Kill the workers, and fail the calls that are open."""

    # For the engine's thread, which has the engine's lock.

    @abstractmethod
    def _send(self, call: Call) -> None:
        """Send a call to the workers, without waiting for them."""

    @abstractmethod
    def _kill_workers(self) -> None:
        """Kill the workers that are alive, without waiting for their end."""

    @abstractmethod
    def _situation(self, rank: int) -> str:
        """Other facts about a rank that does not answer; may be empty."""

    def _turn(self) -> None:
        """End the call whose time has come, and send the next one."""
        if self._queue.look():
            self._kill_workers()
        if (call := self._queue.to_send()) is not None:
            self._send(call)
