"""A question that is answered in a fork of this process, under limits: of time, memory and system calls.

For computations on hostile input by libraries that take long to import: the fork has them. It can write no file, start
no process and reach no network (`seccomp.computing_only`, on machines that have a filter; limits hold everywhere), has
none of this process's open files, and ends with it. All that comes back is its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from hyper_parallel.rl.rewards import seccomp

CPU_S = 1
"""Of processor time: what a computation gets, whatever else runs on the machine."""
WALL_S = 5.0
"""Longer, so that the same answer has the same reward on a machine that is busy with others."""
MEMORY_BYTES = 512 << 20
"""Of address space, beside that of this process."""
_TRUE, _FALSE = 100, 101
"""Exit codes that nothing else has."""
_PDEATHSIG = 1


def ask(question: Callable[[], bool]) -> bool | None:
    """The answer; None where the fork met a limit, raised or crashed. Raises OSError where none can be forked."""
    filters = seccomp.computing_only()
    # Flushed here, else what is buffered would be in both processes.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    child = os.fork()
    if not child:
        _answer(question, filters)
    _, status = os.waitpid(child, 0)
    return {_TRUE: True, _FALSE: False}.get(os.waitstatus_to_exitcode(status))


def _answer(question: Callable[[], bool], filters: bytes) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # a collection would write to, and so copy, the pages of all that was made until now
        _limit()
        if filters:
            with contextlib.suppress(OSError):  # a kernel without filters
                seccomp.load(filters)
        code = _TRUE if question() else _FALSE
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _limit() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    limits = {"CPU": CPU_S, "CORE": 0, "FSIZE": 0, "NPROC": 0}
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        limits["AS"] = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        low = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (low, low))
