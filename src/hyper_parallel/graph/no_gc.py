"""Suspends garbage collection while a step is captured, rewritten or planned.

That makes graphs of tens of thousands of nodes that all stay until it is done. Python's collector of cycles would look
through them, and through all else that the process has, again and again, which takes up to a third of the time and
finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
