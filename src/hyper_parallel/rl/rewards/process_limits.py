"""Limits of a process: filters of system calls (seccomp(2)), and a question answered in a fork under limits.

Filters are the programs of classic BPF that the kernel runs for each call.
A filter is loaded by a process for itself and for what it forks, after it has given up gaining rights
(PR_SET_NO_NEW_PRIVS), and cannot be taken off. Numbers are those of arch/x86/entry/syscalls/syscall_64.tbl and of
include/uapi/asm-generic/unistd.h. A call of another architecture's table (32-bit, x32) ends the process, since its
numbers mean other calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NoReturn

_GENERIC = ("aarch64", "riscv64", "loongarch64")
_ARCH = {
    "x86_64": 0xC000003E,
    "aarch64": 0xC00000B7,
    "riscv64": 0xC00000F3,
    "loongarch64": 0xC0000102,
}
"""AUDIT_ARCH of linux/audit.h."""
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # System V shared memory, semaphores and message queues, POSIX message queues, files in memory without names
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    # memory, time, signals to itself, and its own end
    "brk": (12, 214),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "sched_yield": (24, 124),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # reading, for modules that are imported late
    "read": (0, 63),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "fstat": (5, 80),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "getdents64": (217, 61),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
}
"""(on x86_64, on the machines with the generic table); None: the machine does not have it."""
_OPEN: dict[str, tuple[int | None, int | None, int]] = {"open": (2, None, 1), "openat": (257, 56, 2)}
"""The same, and which argument has the flags."""

IPC = (
    "shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv",
    "msgctl", "mq_open", "memfd_create",
)  # fmt: skip
"""Calls for memory that no limit of a process counts, and that may outlive it."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_X32 = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


@cache
def refusing_ipc() -> bytes:
    """The filter under which the calls of `IPC` fail with EPERM. Empty where there is none for this machine."""
    if not _known():
        return b""
    return _program(_numbers(IPC), {}, listed=_EPERM, other=_ALLOW)


@cache
def computing_only() -> bytes:
    """The filter for a process that computes: it can use memory, read files and end, and all other calls (files for
    writing, sockets, processes, signals to others, limits) fail with EPERM. Empty where there is none for this machine.
    """
    if not _known():
        return b""
    column = int(os.uname().machine in _GENERIC)
    opens = {number: flags for *numbers, flags in _OPEN.values() if (number := numbers[column]) is not None}
    return _program(_numbers(set(_NUMBERS) - set(IPC)), opens, listed=_ALLOW, other=_EPERM)


def load(program: bytes) -> None:
    """Put this process under a filter, for good. Raises OSError where the kernel has no filters."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of 8 bytes, and, after padding, their address.
    header = (ctypes.c_size_t * 2)(len(program) // 8, ctypes.addressof(code))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _known() -> bool:
    return sys.platform == "linux" and sys.byteorder == "little" and os.uname().machine in _ARCH


def _numbers(names: Iterable[str]) -> list[int]:
    column = int(os.uname().machine in _GENERIC)
    return sorted(number for name in names if (number := _NUMBERS[name][column]) is not None)


def _program(numbers: Iterable[int], opens: Mapping[int, int], *, listed: int, other: int) -> bytes:
    """The instructions (struct sock_filter) over struct seccomp_data: the number at 0, the architecture at 4, argument
    i at 16 + 8 i. `opens`: calls that are allowed with flags that neither write nor create."""
    machine = os.uname().machine
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in numbers:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, listed)]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for number, flags in opens.items():
        lines += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, 16 + 8 * flags),
            (_ANY_BIT, 0, 1, writes),
            (_RETURN, 0, 0, _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    lines.append((_RETURN, 0, 0, other))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


# A question that is answered in a fork of this process, under limits: of time, memory and system calls.
#
# For computations on hostile input by libraries that take long to import: the fork has them. It can write no file,
# start no process and reach no network (`seccomp.computing_only`, on machines that have a filter; limits hold
# everywhere), has none of this process's open files, and ends with it. All that comes back is its exit code.

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
    filters = computing_only()
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
                load(filters)
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
