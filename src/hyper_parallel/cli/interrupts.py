"""Signals before and after a run, when nothing would be lost. Imports only fast modules."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside this context SIGTERM and SIGHUP end the command like Ctrl-C, and SIGUSR1 (save) is ignored.

    Signals that the caller ignores (nohup) stay ignored. Outside the main thread the context does nothing.
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
