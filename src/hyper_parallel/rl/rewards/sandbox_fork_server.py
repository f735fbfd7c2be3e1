"""The sandbox's fork server: an interpreter that has started once, and is forked for each program.

Starting an interpreter costs more than isolating a program. So each thread that runs programs has one server, which
forks a launcher for each (`sandbox_launcher.serve`) and never reads nor runs any of them: a program finds a fresh copy
of an interpreter that has seen none before. The server ends with its thread, and takes a program that runs with it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType

from hyper_parallel.errors import ConfigError, LaunchError

_BOOT = """\
import marshal, os, sys
code = b""
while part := os.read(0, 1 << 16):
    code += part
names = {"__name__": "launcher"}
exec(marshal.loads(code), names)
names["serve"](int(sys.argv[1]), int(sys.argv[2]))
"""
_WAIT_S = 60.0
"""For the server to start, to fork, and to end what it forked."""


class ForkServer:
    """A server of this thread. It is not used by a fork of this process."""

    def __init__(self) -> None:
        """Raises ConfigError where the interpreter cannot be started, LaunchError where it ends at once."""
        self._owner = os.getpid()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_WAIT_S)
        try:
            # Its standard streams are pipes, since the program's are: what Python finds out about them stays true.
            self._process = subprocess.Popen(
                [interpreter(), "-P", "-s", "-S", "-c", _BOOT, str(theirs.fileno()), str(self._owner)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # Symbols are resolved here once, and not in each fork.
                env={"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._channel.close()
            raise ConfigError(
                f"the sandbox cannot start {interpreter()}: {error.strerror}; mend it"
            ) from error
        finally:
            theirs.close()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdin, process.stdout, process.stderr:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(marshal.dumps(launcher()))
            process.stdin.close()
            if not self._answer(1):
                self.close()
                raise no_start(process.stderr.read().decode(errors="replace"))

    @property
    def usable(self) -> bool:
        """Whether it runs, and belongs to this process."""
        return self._owner == os.getpid() and self._channel.fileno() >= 0 and self._process.poll() is None

    def fork(self, files: Sequence[int]) -> bool:
        """Fork a launcher with these descriptors: of the program's standard streams, and of the launcher's reports.

        False where the server has ended. Raises LaunchError where the machine has no process for it.
        """
        with contextlib.suppress(OSError):
            socket.send_fds(self._channel, [b"f"], list(files))
        number = int.from_bytes(self._answer(8), "little", signed=True)
        if number < 0:
            raise no_start(os.strerror(-number))
        if not number:
            self.close()
        return number > 0

    def end(self, gently: bool) -> None:
        """End the launcher and all that it left. `gently`: it kills the program itself, which has no PID namespace."""
        what = b"t" if gently else b"k"
        with contextlib.suppress(OSError):
            self._channel.sendall(what)
        if self._answer(1) != what:
            self.close()

    def close(self) -> None:
        """Kill the server, which takes a launcher that runs with it."""
        if self._owner != os.getpid():
            self._process.returncode = 0  # a child of another process: not to be waited for
        elif self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _answer(self, size: int) -> bytes:
        """Empty if it has ended, or does not answer."""
        found = b""
        with contextlib.suppress(OSError):
            while len(found) < size and (part := self._channel.recv(size - len(found))):
                found += part
        return found if len(found) == size else b""


_of_thread = threading.local()


def fork_server() -> ForkServer:
    """This thread's server; a new one where the last one has ended. Raises as `ForkServer`."""
    found: ForkServer | None = getattr(_of_thread, "server", None)
    if found is None or not found.usable:
        found = _of_thread.server = ForkServer()
    return found


def forked(files: Sequence[int]) -> ForkServer:
    """This thread's server, with a launcher that has these descriptors. Raises as `ForkServer` and `fork`."""
    for _ in range(2):
        server = fork_server()
        if server.fork(files):
            return server
        # It was killed: nothing has been sent to a launcher yet.
    raise no_start("its server ended twice")


def no_start(said: str) -> LaunchError:
    """The error of what says nothing about a program: its last line is why."""
    lines = said.strip().splitlines() or ["no message"]
    return LaunchError(f"the sandbox could not start a program: {lines[-1][:200]}; free memory or processes")


@cache
def launcher() -> CodeType:
    """The launcher's code. Compiled here, since an interpreter would compile a script at each start."""
    path = Path(__file__).with_name("sandbox_launcher.py")
    return compile(path.read_text(encoding="utf-8"), "launcher", "exec")


@cache
def interpreter() -> str:
    """The interpreter itself, and not a virtual environment's link to it: its packages are not for programs."""
    return getattr(sys, "_base_executable", None) or sys.executable
