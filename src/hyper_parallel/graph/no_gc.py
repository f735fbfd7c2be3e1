"""Suspends garbage collection while a step is captured, rewritten or planned.

That makes graphs of tens of thousands of nodes that all stay until it is done. Python's collector of cycles would look
through them, and through all else that the process has, again and again, which takes up to a third of the time and
finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def collect_between() -> None:
    """Free what one large step has left before the next one is made, where the collector rests for longer than both."""
    if not gc.isenabled():
        gc.collect()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """In the block cycles are not collected; what has none is freed at once as ever. May be nested."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
