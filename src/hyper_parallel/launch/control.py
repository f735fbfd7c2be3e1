"""A worker's control thread: receives signals and orders, reports where the main thread is.

A Python signal handler runs only once the main thread is back in Python, which a collective or a compiler may delay for
minutes. The interpreter's wakeup descriptor notifies this thread at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

from hyper_parallel.errors import PREFIX
from hyper_parallel.launch import stop
from hyper_parallel.launch.heartbeat import BEAT_S, pulse

log = logging.getLogger(__name__)

ASK_S = 0.05
"""Seconds between requests to the main thread to leave: it cannot leave in the middle of a PyTorch operation."""
LEAVE_S = 5.0
"""Seconds in which the main thread must leave if there is nothing to save, or after a second Ctrl-C."""

Order = str
"""``stop``, ``save``, ``end`` (another worker has failed), or ``fail`` (the same, with nobody to end this process)."""


class Link(Protocol):
    """The channel on which a worker receives orders and reports signals."""

    def sources(self) -> list[Connection]:
        """The descriptor that becomes readable when an order may have arrived."""

    def orders(self) -> list[Order]:
        """The orders since the last call."""

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message. Never raises; it is lost if the other end has gone."""


class CommandLink:
    """A local worker's channel to the command that supervises it: a pipe."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._open = True

    def sources(self) -> list[Connection]:
        return [self._end] if self._open else []

    def orders(self) -> list[Order]:
        found: list[Order] = []
        try:
            while self._open and self._end.poll():
                found.append(json.loads(self._end.recv_bytes())["do"])
        except (EOFError, OSError):  # the command has gone, and the kernel ends this process
            self._open = False
        return found

    def tell(self, message: Mapping[str, Any]) -> None:
        # A command that was suspended reads nothing: what only describes the present is not waited with.
        if message["event"] == "beat" and not select.select([], [self._end], [], 0)[1]:
            return
        with self._lock, contextlib.suppress(OSError):
            self._end.send_bytes(json.dumps(message).encode())


class ControlThread:
    """Handles the signals of `stop.STOPS` and `stop.SAVE` for this process while it is entered.

    `grace`: seconds from a stop request until the process ends in any case; None leaves that to the sender of orders.
    `force`: a second Ctrl-C ends the process at once; otherwise that is left to the sender too.
    `safe`: what is not lost then. `obeys`: whether signals request anything; a controller's workers ignore them.
    """

    def __init__(
        self,
        link: Link,
        *,
        grace: float | None = None,
        force: bool = False,
        safe: str = "",
        obeys: bool = True,
    ) -> None:
        self._obeys = obeys
        self._link, self._grace, self._force, self._safe = link, grace, force, safe
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._closed = False
        self._asked_at: float | None = None
        self._ended = False  # by an order: signals have nothing more to say
        self._leave_at, self._code = float("inf"), 130
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> ControlThread:
        stop.reset()
        pulse.reset()
        signals = (*stop.STOPS, stop.SAVE)
        if threading.current_thread() is self._main:
            # A handler that does nothing: unlike SIG_IGN, programs that the worker starts do not inherit it.
            handler = _in_main_thread if self._obeys else _ignore
            self._undo.enter_context(
                stop.handling({**dict.fromkeys(signals, handler), stop.WAKE: _in_main_thread})
            )
            before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
            self._undo.callback(signal.set_wakeup_fd, before)
            _in_children.append(self)
            self._undo.callback(_in_children.remove, self)
            # The fork server has them blocked, so that none is lost between the fork and here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._closed = True
        self._waker.close()
        self._thread.join(timeout=2 * BEAT_S)

    def let_go(self) -> None:
        """In a forked child: detach, so that its signals do not reach this process's control thread."""
        signal.set_wakeup_fd(-1)
        for number in (*stop.STOPS, stop.SAVE, stop.WAKE):
            if signal.getsignal(number) in (_in_main_thread, _ignore):
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )

    def _run(self) -> None:
        beat_at = time.monotonic()
        while not self._closed:
            patience = max(0.0, beat_at - time.monotonic())
            if stop.must_interrupt():
                self._wake_main()
                patience = min(patience, ASK_S)
            ready = wait([self._woken, *self._link.sources()], patience)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._link.tell({"event": "beat", "beat": asdict(pulse.beat())})
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    received = self._woken.recv(4096)
                    if not received:
                        return
                    for number in received:
                        self._signal(number)
            for order in self._link.orders():
                self._order(order)
            self._end_in_time()

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._obeys:
            return
        if number == stop.SAVE:
            stop.request_save()
        elif number in stop.STOPS and not self._ended:
            first = self._asked_at is None
            if self._force and number == signal.SIGINT and not first:
                assert self._asked_at is not None
                if now - self._asked_at > stop.REPEAT_S:
                    stop.request_end()
                    self._leave()
            self._stop()
        else:
            return
        log.info("got %s", signal.Signals(number).name)
        self._link.tell({"event": "signal", "number": number})

    def _order(self, order: Order) -> None:
        if order == "save":
            stop.request_save()
        elif order == "stop":
            self._stop()
        elif order in ("end", "fail"):
            self._ended = True
            stop.request_end()
            if order == "fail":
                self._code = 1
                self._leave()

    def _stop(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        stop.request_stop()
        if stop.must_interrupt():
            self._leave()

    def _leave(self) -> None:
        """End the process if the main thread cannot leave: it waits for a lost peer, or is in a native call."""
        self._leave_at = min(self._leave_at, time.monotonic() + LEAVE_S)

    def _wake_main(self) -> None:
        # A signal and not only a flag, so that it also returns from a system call.
        with contextlib.suppress(ProcessLookupError):
            if self._main.ident is not None:
                signal.pthread_kill(self._main.ident, stop.WAKE)

    def _end_in_time(self) -> None:
        now = time.monotonic()
        if now > self._leave_at and (stop.must_interrupt() or stop.interrupted()):
            os._exit(self._code)
        if self._grace is not None and self._asked_at is not None and now > self._asked_at + self._grace:
            sys.__stderr__.write(  # type: ignore[union-attr]
                f"{PREFIX}this worker did not end in the {self._grace:g} s of launch.grace and leaves; "
                f"{self._safe}\n"
            )
            os._exit(130)


def _in_main_thread(number: int, frame: FrameType | None) -> None:
    """The control thread does the rest."""
    if number in stop.STOPS and not stop.must_interrupt():
        stop.request_stop()
    stop.interrupt(frame)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The controller decides when its workers end."""


_in_children: list[ControlThread] = []


def _after_fork() -> None:
    for control in _in_children:
        control.let_go()


os.register_at_fork(after_in_child=_after_fork)
