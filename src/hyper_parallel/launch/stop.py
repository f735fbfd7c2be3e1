"""A request to stop, as a flag: Ctrl-C and SIGTERM let a worker finish its step and save."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_requested = threading.Event()


def stop_requested() -> bool:
    """Whether this worker was asked to stop (Ctrl-C, SIGTERM). Ranks hear it at different moments: agree
    first.
    """
    return _requested.is_set()


@contextlib.contextmanager
def listening(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """While inside, the first of `signals` sets the flag, and a second one raises KeyboardInterrupt."""
    _requested.clear()

    def handle(number: int, frame: FrameType | None) -> None:
        if _requested.is_set():
            raise KeyboardInterrupt
        _requested.set()

    with handling(dict.fromkeys(signals, handle)):
        yield


@contextlib.contextmanager
def ending(number: signal.Signals) -> Iterator[None]:
    """While inside, `number` raises KeyboardInterrupt, so that files and memory are given back on the way out; where an
    error is on its way out already, it does nothing."""

    def handle(_: int, frame: FrameType | None) -> None:
        if sys.exc_info()[1] is None:
            raise KeyboardInterrupt

    with handling({number: handle}):
        yield


@contextlib.contextmanager
def handling(handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Install signal handlers, and put the previous ones back at the end. Only the main thread can; others
    skip.

    A signal that is ignored (nohup does so with SIGHUP) stays ignored, but for SIGINT, which shells ignore
    for what they start in the background and which the launcher then sends on purpose.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    for number, handler in handlers.items():
        if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
            continue
        previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
