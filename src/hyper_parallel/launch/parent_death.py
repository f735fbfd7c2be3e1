"""Ends a process when its parent ends, however that happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """Have the kernel send this process SIGKILL when `parent`, its parent's process id, ends (Linux only).

    Elsewhere the processes notice by the closed pipe. Exits at once when the parent has gone already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
