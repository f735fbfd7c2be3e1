"""Signals that come before a run is there, or after it: nothing would be lost. Imports nothing that takes long."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP end the command as Ctrl-C does; SIGUSR1, which asks a run to save, does nothing.

    What the caller has ignored (nohup) stays ignored. Only the main thread can; others skip.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        signal.SIGTERM: signal.default_int_handler,
        signal.SIGHUP: signal.default_int_handler,
        signal.SIGUSR1: lambda number, frame: None,
    }
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
