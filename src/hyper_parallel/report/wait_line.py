"""Status of long operations before the first result: a line with elapsed seconds, or a plain line.

Whoever owns the terminal opens `announcing`; code that may take long says so with `waiting`. On a terminal a wait is a
line that counts seconds and disappears. Elsewhere it is one plain line, without control characters, for a wait that
has taken `PLAIN_S`. Without `announcing`, as on ranks other than 0 and in a user's own script, nothing is shown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TextIO

SHOWN_S = 0.5
"""On a terminal, seconds before a wait is shown."""
PLAIN_S = 3.0
"""Elsewhere, seconds before a wait is worth a line."""
_REFRESH_S = 0.5

_stream: TextIO | None = None
_active = False
_detail = ""
"""What of the wait at hand is under way."""


@contextlib.contextmanager
def announcing(stream: TextIO | None) -> Iterator[None]:
    """Inside, waits are shown on `stream`; None shows none."""
    global _stream
    before, _stream = _stream, stream
    try:
        yield
    finally:
        _stream = before


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that `what` is under way. A wait inside another one is a part of it, and not shown."""
    global _active, _detail
    stream = _stream
    if stream is None or _active:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(stream, what, over), name="waiting", daemon=True)
    _active = True
    thread.start()
    try:
        yield
    finally:
        _active, _detail = False, ""
        over.set()
        thread.join()


def note_progress(text: str) -> None:
    """Show in the line of the wait at hand what of it is under way; elsewhere than on a terminal as a line."""
    global _detail
    stream = _stream
    if stream is None or not _active:
        return
    _detail = text
    with contextlib.suppress(OSError, ValueError):
        if not stream.isatty():
            print(text, file=stream, flush=True)


def _show(stream: TextIO, what: str, over: threading.Event) -> None:
    began = time.monotonic()
    # A terminal that went away, or a full disk behind a pipe, ends nothing.
    with contextlib.suppress(OSError, ValueError):
        if not stream.isatty():
            if not over.wait(PLAIN_S):
                print(f"{what} …", file=stream, flush=True)
            return
        if over.wait(SHOWN_S):
            return
        while True:
            detail = f"; {_detail}" if _detail else ""
            stream.write(f"\r\x1b[2K{what} … {time.monotonic() - began:.0f} s{detail}")
            stream.flush()
            if over.wait(_REFRESH_S):
                break
        stream.write("\r\x1b[2K")
        stream.flush()
