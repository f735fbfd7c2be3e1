"""Pending copies: waiting with a timeout, and ordering of copies of the same bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from hyper_parallel.compat import Backend, Event
from hyper_parallel.errors import FaultError, TierError


class Copy:
    """One copy: a `Pending`, and what other copies need to know of it.

    Two things must happen until it is over. Its work is given to where it runs or, where that is a thread, done
    (`issued`); and what the work launched on a device's stream is reached (`event`).
    """

    def __init__(
        self,
        what: str,
        first: int,
        x: torch.Tensor,
        limit: float,
        backend: Backend,
        span: int | None = None,
    ) -> None:
        """`x`: what is copied. `span`: bytes of the tier that must not change meanwhile; left out, as many as `x`
        has."""
        self.what = what
        """In words, for messages."""
        self.first, self.bytes = first, x.numel() if span is None else span
        """Where in the tier."""
        self.sums: list[int] = []
        """Checksums of its parts, of a write where the tier keeps some."""
        self._x: torch.Tensor | None = x  # its memory must not be used again before the copy is over
        self._limit = limit
        self.by_host = False
        """A thread of the host does it, or has to wait for one that does."""
        self._ready, self._began, self._over = (
            backend.Event(),
            backend.Event(timing=True),
            backend.Event(timing=True),
        )
        self._timed = False
        self._took: float | None = None
        self._ready.record()
        self._issued = threading.Event()
        self._failure: BaseException | None = None

    @property
    def ready(self) -> Event:
        """Reached when what the caller had launched before is done."""
        return self._ready

    def attempt(self, work: Callable[[], object]) -> None:
        """Do `work`, which is all of the copy, on the stream that is current."""
        try:
            work()
            self._over.record()
        except BaseException as error:
            self.finish(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C, where work is done in the calling thread
        self.finish()

    def begin(self) -> None:
        """Say that all it waited for is over, on the stream that is current: its link is its own from now on."""
        self._timed = True
        self._began.record()

    def took(self, seconds: float) -> None:
        """Say for how long it had its link, where no stream knows."""
        self._took = seconds

    def finish(self, failure: BaseException | None = None) -> None:
        """Say that the work is given, or why it cannot be. The first word counts."""
        if not self._issued.is_set():
            self._failure = failure
            self._issued.set()

    def wait(self) -> float:
        """As `Pending`."""
        held = self.hold()
        self._x = None
        return held

    def hold(self) -> float:
        """Let the current stream find the copy over, as one copy does that comes after another."""
        held = self._given()
        if self._failure is not None:
            raise self._error() from self._failure
        self._over.wait()
        return held

    def block(self) -> None:
        """Block the thread until it is over. Raises TierError if it failed."""
        self._given()
        if self._failure is not None:
            raise self._error() from self._failure
        self._over.synchronize()

    def done(self) -> bool:
        """As `Pending`."""
        over = self._issued.is_set() and (self._failure is not None or self._over.query())
        if over:
            self._x = None
        return over

    @property
    def seconds(self) -> float | None:
        """As `Pending`."""
        if not self.done() or self._failure is not None:
            return None
        if self._took is None and self._timed:
            self._took = 1e-3 * self._began.elapsed_time(self._over)
        return self._took

    def settle(self) -> None:
        """Block the thread until it is over, well or badly. Raises TierError at the time limit."""
        self._given()
        if self._failure is None:
            self._over.synchronize()
        self._x = None

    def _error(self) -> TierError:
        """A full disk is the user's to mend; what else fails in the middle of a copy is not."""
        mendable = isinstance(self._failure, TierError) and not isinstance(self._failure, FaultError)
        return (TierError if mendable else FaultError)(f"{self.what} failed: {self._failure}")

    def _given(self) -> float:
        started = time.perf_counter()
        if not self._issued.wait(self._limit):
            raise FaultError(
                f"{self.what} has not ended within {self._limit:g} s: the memory or the disk behind it does not "
                "answer; see the system's log"
            )
        return time.perf_counter() - started

    def meets(self, first: int, count: int) -> bool:
        """Whether it is about one of these bytes."""
        return self.first < first + count and first < self.first + self.bytes


class UnderWay:
    """The copies of a tier that may not be over yet."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []

    def add(self, copy: Copy) -> list[Copy]:
        """Note a copy; those that must be over before it may begin."""
        self._copies = [other for other in self._copies if not other.done()]
        before = [other for other in self._copies if other.meets(copy.first, copy.bytes)]
        self._copies.append(copy)
        return before

    def settle(self) -> None:
        """Block until all are over, well or badly."""
        for copy in self._copies:
            copy.settle()
        self._copies.clear()
