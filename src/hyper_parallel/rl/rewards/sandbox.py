"""A sandbox for programs that a model wrote: namespaces, resource limits and bounded output.

`run` executes a Python program in an interpreter of its own (`sandbox_launcher`):

- no network, no view of other processes (network, PID, IPC and UTS namespaces), no privileges;
- a file system of the Python installation, read-only, and an empty working folder in memory, which ends with it;
- limits on CPU and wall time, memory, files, processes and output (setrlimit(2); the caller measures wall time);
- an empty environment and no site packages. Sets have the same order in each run (PYTHONHASHSEED=0).

What a machine does not allow is named in one warning, or refused (`isolation="required"`). The kernel is shared: a
program that exploits a defect of the kernel escapes. docs/rl-rewards.md lists what is not limited.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from hyper_parallel.errors import ConfigError, LaunchError

Isolation = Literal["required", "preferred", "none"]
End = Literal["exit", "signal", "cpu time", "wall time", "output", "lost"]

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_GRACE_S = 5.0
"""For a launcher without a PID namespace to kill its descendants."""

_BOOT = """\
import marshal, os
def read(count):
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            os._exit(1)
        found += part
    return found
code, settings, program = marshal.loads(read(int.from_bytes(read(8), "little")))
names = {"__name__": "launcher"}
exec(code, names)
names["main"](settings, program)
"""


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
    """What was not isolated: of `network`, `processes` and `files`."""

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
    start = time.monotonic()
    status, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [_interpreter(), "-P", "-s", "-S", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs],
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        os.close(status)
        raise ConfigError(f"the sandbox cannot start {_interpreter()}: {error.strerror}; mend it") from error
    finally:
        os.close(theirs)
    settings: dict[str, Any] = {
        "parent": os.getpid(),
        "status": theirs,
        "isolate": isolation != "none",
        "required": isolation == "required",
        "temporary": tempfile.gettempdir(),
        "paths": _readable_paths(),
        "cpu": limits.cpu_s,
        "memory": limits.memory_bytes,
        "disk": limits.disk_bytes,
        "files": limits.open_files,
        "processes": limits.processes,
    }
    message = marshal.dumps((_launcher(), settings, program.encode("utf-8", "replace").decode()))
    reading = _Reading(process, status, limits.output_bytes)
    try:
        ended = reading.go(len(message).to_bytes(8, "little") + message + stdin, start + limits.wall_s)
    finally:
        _end(process, private="processes" not in reading.missing)
        os.close(status)
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
        said = reading.output[1].decode(errors="replace").strip().splitlines() or ["no message"]
        raise LaunchError(
            f"the sandbox could not start a program: {said[-1][:200]}; free memory or processes"
        )
    return _outcome(reading, ended, limits, time.monotonic() - start)


def check(isolation: Isolation = "preferred") -> None:
    """Find out what this machine isolates: raises ConfigError, or warns, as `run` does."""
    run("pass", isolation=isolation)


class _Reading:
    """Feeds a program and reads its output, with bounds, until all pipes are closed."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, most: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input = process.stdin.fileno()
        self._status = status
        self._files = process.stdin, process.stdout, process.stderr
        self._most = most
        self._read = {
            process.stdout.fileno(): bytearray(),
            process.stderr.fileno(): bytearray(),
            status: bytearray(),
        }

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
                            self._files[0].close()
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


def _end(process: subprocess.Popen[bytes], private: bool) -> None:
    """Kill what is left and close the pipes. The launcher of a PID namespace takes the namespace with it."""
    if not private:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    # Its process group too: a launcher that was killed by its program, where both are in one PID namespace.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            file.close()


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
def _launcher() -> CodeType:
    """The launcher's code. Compiled once here, since an interpreter would compile a script at each start."""
    path = Path(__file__).with_name("sandbox_launcher.py")
    return compile(path.read_text(encoding="utf-8"), "launcher", "exec")


@cache
def _interpreter() -> str:
    """The interpreter itself, and not a virtual environment's link to it: its packages are not for programs."""
    return getattr(sys, "_base_executable", None) or sys.executable


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
