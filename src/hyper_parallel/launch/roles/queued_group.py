"""The parts of groups and engines that do not depend on how workers run: a group's queue, an engine's thread."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.roles.call_queue import CallQueue, sent_lists
from hyper_parallel.launch.roles.protocol import Future, Instruction

SUSPENDED_S = 2.0
"""Seconds by which the engine's thread must oversleep to conclude that this process was suspended."""

AnyGroup = TypeVar("AnyGroup", bound="QueuedGroup")


class QueueEngine(ABC, Generic[AnyGroup]):
    """An engine with one thread that serves the queues of its groups (`interface.Engine`, without `start`)."""

    def __init__(self) -> None:
        self._groups: dict[str, AnyGroup] = {}
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._thread = threading.Thread(target=self._guarded, name="roles", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def begin(self, group: AnyGroup, timeout_s: float) -> Future:
        """Start the workers of a group that has none."""

    @abstractmethod
    def kill(self, group: AnyGroup, why: str) -> None:
        """Kill a group's workers, and fail its calls."""

    @abstractmethod
    def close(self) -> None:
        """End all workers; a second call does nothing."""

    @abstractmethod
    def _serve(self) -> None:
        """The thread: hear the workers and look at the queues until the engine is closed."""

    @abstractmethod
    def _wake(self) -> None:
        """Have the thread look again."""

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
            self.begin(group, timeout_s)
        except BaseException:
            with self._changed:
                del self._groups[group.name]
            raise
        return group

    def _postpone(self, overslept: float) -> None:
        """Deadlines do not run while this process is suspended."""
        if overslept > SUSPENDED_S:
            for group in self._groups.values():
                group._queue.postpone(overslept)

    def _guarded(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a wait must not depend on a thread that is gone
            with self._changed:
                for group in self._groups.values():
                    group._queue.stop(f"the engine's thread failed with {type(error).__name__}: {error}")
            raise


class QueuedGroup:
    """A group whose engine serves its queue (`interface.Group`, without `pids`)."""

    def __init__(self, engine: QueueEngine[Any], config: RoleLaunch, exact: bool = True) -> None:
        """`exact`: as for `CallQueue`."""
        self.config = config
        self.name, self.size = config.name, config.effective_strategy.world
        self._engine = engine
        self._queue = CallQueue(self.name, self.size, self.log, self._situation, exact)
        self.ready: Future

    def log(self, rank: int) -> Path:
        """The log of a worker."""
        return Path(self.config.out).absolute() / "logs" / f"{self.name}-{rank}.log"

    @property
    def alive(self) -> bool:
        """Whether calls can succeed."""
        return self._queue.broken is None

    def call(self, instructions: Sequence[Instruction], *, timeout_s: float, what: str = "") -> Future:
        """Send every rank the same list."""
        return self.call_each([instructions] * self.size, timeout_s=timeout_s, what=what)

    def call_each(
        self, instructions: Sequence[Sequence[Instruction]], *, timeout_s: float, what: str = ""
    ) -> Future:
        """Send each rank its list."""
        sent = sent_lists(self.name, self.size, instructions)
        with self._engine.noticed():
            return self._queue.submit(instructions, sent, timeout_s, what)

    def kill(self) -> None:
        """Kill the workers, and wait until they are gone."""
        self._engine.kill(self, "it was killed by request")

    def restart(self, *, timeout_s: float) -> Future:
        """Kill what is left and start anew."""
        self._engine.check_open()
        self._engine.kill(self, "it was restarted")
        return self._engine.begin(self, timeout_s)

    def _situation(self, rank: int) -> str:
        """What else is known of a rank that does not answer; may be empty."""
        return ""
