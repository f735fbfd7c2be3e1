"""Threads in the background that are over before the interpreter is.

While it shuts down, CPython ends a daemon thread at the moment it asks for the interpreter's lock. Where that is on the
way out of a C++ function, as in most of PyTorch's, the whole process aborts ("terminate called without an active
exception"): a plain Ctrl-C becomes a core dump. A non-daemon thread would keep the process from ending instead. These
threads are therefore daemons that are asked to end, and joined, at exit. A thread that does not end, for example
because its disk does not answer, delays the exit by at most `PATIENCE` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable

PATIENCE = 10.0
"""Seconds for all threads together, at exit."""

_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()


def start(target: Callable[[], None], name: str, end: Callable[[], None], stack: int = 0) -> threading.Thread:
    """Run `target` in a thread. `end` is called at exit, while it still runs: it drops what has not begun and lets
    `target` return. Neither may refer to an object whose collection is to end the thread. `stack`: its bytes; 0 is
    the platform's."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _running[thread] = end
    usual = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


@atexit.register
def _end_all() -> None:
    running = [(thread, end) for thread, end in list(_running.items()) if thread.is_alive()]
    for _, end in running:
        with contextlib.suppress(Exception):
            end()
    until = time.monotonic() + PATIENCE
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
