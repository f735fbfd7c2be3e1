"""A sandbox for programs that a model wrote: namespaces, resource limits and bounded output.

`run` executes a Python program in a process of its own, a fork of an interpreter that has run none (`sandbox_launcher`,
`sandbox_fork_server`):

- no network, no view of other processes (network, PID, IPC and UTS namespaces), no privileges;
- a file system of the Python installation, read-only, and an empty working folder in memory, which ends with it;
- limits on CPU and wall time, memory, files, processes and output (setrlimit(2); the caller measures wall time);
- no memory that these do not count: System V and POSIX objects of memory and messages are refused (seccomp(2));
- an empty environment and no site packages. Sets have the same order in each run (PYTHONHASHSEED=0).

What a machine does not allow is named in one warning, or refused (`isolation="required"`). The kernel is shared: a
program that exploits a defect of the kernel escapes. docs/rl-rewards.md lists what is not limited.
"""

from __future__ import annotations

import logging
import marshal
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.rewards import process_limits
from hyper_parallel.rl.rewards.sandbox_fork_server import ForkServer, forked, no_start

Isolation = Literal["required", "preferred", "none"]
End = Literal["exit", "signal", "cpu time", "wall time", "output", "lost"]

_log = logging.getLogger(__name__)
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """Of each process; in whole seconds, as the kernel counts."""
    memory_bytes: int = 256 * _MIB
    """Address space of each process."""
    disk_bytes: int = 16 * _MIB
    """Of all files together; of each file where the file system is not isolated."""
    open_files: int = 64
    processes: int = 8
    """Processes and threads at one time, the program's first one included."""
    output_bytes: int = 64 << 10
    """Of each of standard output and standard error."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    ended: End
    """`exit` and `signal`: by itself; the others name the limit. `lost`: it killed its supervisor."""
    code: int
    """The exit code or the signal's number; 0 for the other ends."""
    stdout: bytes
    stderr: bytes
    cpu_s: float
    """Processor time of the program and the children that it waited for; 0 where a limit ended it."""
    wall_s: float
    missing: tuple[str, ...]
    """What was not isolated: of `network`, `processes`, `files` and `shared memory`."""

    @property
    def succeeded(self) -> bool:
        """Whether it ran to its end with exit code 0."""
        return self.ended == "exit" and self.code == 0


def run(
    program: str, stdin: bytes = b"", limits: Limits | None = None, isolation: Isolation = "preferred"
) -> Outcome:
    """Run a Python program and return how it ended.

    `isolation`: `required` raises ConfigError where the machine does not isolate network, processes and files;
    `preferred` warns once; `none` sets limits only. Any thread may call it; the program dies with that thread. Raises
    LaunchError when the machine cannot start the program, which says nothing about the program.
    """
    limits = limits or Limits()
    settings: dict[str, Any] = {
        "isolate": isolation != "none",
        "required": isolation == "required",
        "temporary": tempfile.gettempdir(),
        "paths": _readable_paths(),
        "cpu": limits.cpu_s,
        "memory": limits.memory_bytes,
        "disk": limits.disk_bytes,
        "files": limits.open_files,
        "processes": limits.processes,
        "filter": process_limits.refusing_ipc(),
    }
    message = marshal.dumps((settings, program.encode("utf-8", "replace").decode()))
    reading = _Reading(limits.output_bytes)
    try:
        server = reading.begin()
        start = time.monotonic()
        try:
            ended = reading.go(len(message).to_bytes(8, "little") + message + stdin, start + limits.wall_s)
        finally:
            server.end(gently="processes" in reading.missing)
    finally:
        reading.close()
        if reading.folder:
            shutil.rmtree(reading.folder, ignore_errors=True)
    if reading.missing and isolation == "required":
        raise ConfigError(
            f"the sandbox cannot isolate {_listed(reading.missing)} on this machine, and isolation is required; "
            "allow user namespaces, or set isolation to 'preferred'"
        )
    if reading.missing and isolation == "preferred":
        _warn_once(reading.missing)
    if ended is None and ["ready"] not in reading.report:
        raise no_start(reading.output[1].decode(errors="replace"))
    return _outcome(reading, ended, limits, time.monotonic() - start)


def check(isolation: Isolation = "preferred") -> None:
    """Find out what this machine isolates: raises ConfigError, or warns, as `run` does."""
    run("pass", isolation=isolation)


class _Reading:
    """Feeds a program and reads its output, with bounds, until all pipes are closed."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of an output."""
        self._most = most
        self._open: set[int] = set()
        self._theirs: list[int] = []
        theirs, self._input = self._pipe()
        self._theirs = [theirs]
        self._read: dict[int, bytearray] = {}
        for _ in range(3):
            own, theirs = self._pipe()
            self._read[own] = bytearray()
            self._theirs.append(theirs)
        self._status = own

    def begin(self) -> ForkServer:
        """Fork a launcher with the other ends. Raises LaunchError, ConfigError."""
        server = forked(self._theirs)
        for descriptor in self._theirs:
            self._close(descriptor)
        return server

    def close(self) -> None:
        """Close what is open."""
        for descriptor in list(self._open):
            self._close(descriptor)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)

    @property
    def output(self) -> tuple[bytes, bytes]:
        """Standard output and standard error."""
        out, err, _ = self._read.values()
        return bytes(out[: self._most]), bytes(err[: self._most])

    @property
    def report(self) -> list[list[str]]:
        """The words of each line that the launcher wrote."""
        return [line.split(" ", 1) for line in self._read[self._status].decode(errors="replace").splitlines()]

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not isolated."""
        return tuple(self._word("missing").split(",")) if self._word("missing") else ()

    @property
    def folder(self) -> str:
        """A folder on disk to remove; empty if there is none."""
        return self._word("folder")

    def _word(self, name: str) -> str:
        return next((rest[0] for first, *rest in self.report if first == name and rest), "")

    def go(self, message: bytes, deadline: float) -> End | None:
        """Until the program has ended, or has met a limit, which is returned."""
        left = memoryview(message)
        with selectors.DefaultSelector() as selector:
            os.set_blocking(self._input, False)
            selector.register(self._input, selectors.EVENT_WRITE)
            for descriptor in self._read:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                wait = deadline - time.monotonic()
                if wait <= 0:
                    return "wall time"
                for key, _ in selector.select(wait):
                    if key.fd == self._input:
                        left = self._fed(left)
                        if not left:
                            selector.unregister(self._input)
                            self._close(self._input)
                        continue
                    part = os.read(key.fd, 1 << 16)
                    self._read[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                    if len(self._read[key.fd]) > self._most and key.fd != self._status:
                        return "output"
                if len(selector.get_map()) == 1 and self._input in selector.get_map():
                    break  # nothing reads its input any more
        return None

    def _fed(self, left: memoryview) -> memoryview:
        try:
            return left[os.write(self._input, left[: 1 << 16]) :]
        except BlockingIOError:
            return left
        except OSError:  # it closed its standard input, or ended
            return left[:0]


def _outcome(reading: _Reading, ended: End | None, limits: Limits, wall_s: float) -> Outcome:
    how, rest = next(
        ((first, rest[0]) for first, *rest in reading.report if first in ("exit", "signal")), ("", "")
    )
    code, cpu_s = 0, 0.0
    if ended is None:
        ended = "lost"
        if how:
            number, milliseconds = map(int, rest.split())
            ended, code, cpu_s = ("exit" if how == "exit" else "signal"), number, milliseconds / 1000
            if ended == "signal" and code in (signal.SIGXCPU, signal.SIGKILL) and cpu_s >= limits.cpu_s - 0.1:
                ended, code = "cpu time", 0
    out, err = reading.output
    return Outcome(
        ended=ended, code=code, stdout=out, stderr=err, cpu_s=cpu_s, wall_s=wall_s, missing=reading.missing
    )


_warned = False


def quiet() -> None:
    """No warning from this process: another one has warned."""
    global _warned
    _warned = True


def _warn_once(missing: tuple[str, ...]) -> None:
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "the sandbox does not isolate %s on this machine: programs can reach them with this user's rights; allow "
            "user namespaces, or set isolation to 'required' to refuse",
            _listed(missing),
        )


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@cache
def _readable_paths() -> list[str]:
    """Files and folders that a program can read: those of Python and of the shared libraries that it loads."""
    wanted = [
        "/usr",
        "/bin",
        "/lib",
        "/lib32",
        "/lib64",
        "/etc/ld.so.cache",
        sys.base_prefix,
        sys.base_exec_prefix,
    ]
    if sys.base_prefix.startswith("/nix/store/"):
        wanted.append("/nix/store")
    found: list[str] = []
    for path in wanted:
        if os.path.exists(path) and not any(path == other or path.startswith(other + "/") for other in found):
            found = [other for other in found if not other.startswith(path + "/")] + [path]
    return found
