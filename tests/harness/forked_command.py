"""`run_command`: `hyper-parallel` in a process that has imported it already.

What `python -m hyper_parallel ARGUMENTS` does from the first line of `main` on, with its own folder, environment, open
files, signals and exit code, but without start-up, which is seconds of importing. The fork server that a command starts
for its workers is a fork, too. Start-up itself is tested by subprocesses (tests/cli/test_cli_starts_fast.py).
"""

from __future__ import annotations

import atexit
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from harness.fork_server import fork_context

HERE = Path(__file__).parents[2]


class CommandProcess:
    """A running command, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        largest_file: int = resource.RLIM_INFINITY,
        together: bool = False,
    ) -> None:
        """`largest_file`: the limit on files in bytes. `together`: errors go into the output."""
        self.arguments = list(arguments)
        self._files = [tempfile.TemporaryFile() for _ in range(1 if together else 2)]  # noqa: SIM115
        descriptors = [DupFd(file.fileno()) for file in self._files]
        environment = dict(os.environ if env is None else env)
        self._process = fork_context().Process(
            target=_become_command,
            args=(self.arguments, str(folder), environment, descriptors, largest_file),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired; the command then still runs."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0, *map(bytes, self._read()))
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the command alone, not to its workers."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._process.kill()
        self._process.join()

    def output(self) -> list[str]:
        """What it has written so far: the output and, unless they go together, the errors."""
        return [content.decode() for content in self._read()]

    def _read(self) -> list[bytes]:
        return [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._files]


def run_command(
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    largest_file: int = resource.RLIM_INFINITY,
) -> subprocess.CompletedProcess[str]:
    """Run `hyper-parallel ARGUMENTS` in a folder. Raises subprocess.TimeoutExpired, after it was killed."""
    command = CommandProcess(arguments, folder, env=env, largest_file=largest_file)
    try:
        code = command.wait(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess(["hyper-parallel", *arguments], code, *command.output())


def _become_command(
    arguments: list[str], folder: str, environment: dict[str, str], files: list[Any], largest_file: int
) -> NoReturn:
    descriptors = [file.detach() for file in files]
    output, errors = descriptors[0], descriptors[-1]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (_text(1, line_buffering=False), _text(2, line_buffering=True))
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # As `python -m` has it: the folder first; of the tests' own folders only those that the environment names.
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    tests = {str(HERE / part) for part in ("tests", "benchmarks", "tools")} - set(named)
    sys.path[:] = [folder, *(path for path in sys.path if path not in tests)]
    sys.argv = ["hyper-parallel", *arguments]
    _fork_the_server_of_workers()
    code: Any = 0
    try:
        from hyper_parallel.cli.main import main

        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _text(descriptor: int, line_buffering: bool) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


def _fork_the_server_of_workers() -> None:
    """Fork a process now, while there is one thread, that becomes the fork server of the command when it starts one."""
    from hyper_parallel.launch import forkserver

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_server(theirs)
    theirs.close()
    standby = [(ours, pid)]

    def popen(command: list[str], *, pass_fds: Sequence[int] = (), **options: Any) -> Any:
        if not standby or forkserver._BOOT not in command:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        return _ServerProcess(*standby.pop(), command, pass_fds[0], options["env"])

    forkserver.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )


class _ServerProcess:
    """What `launch.forkserver` uses of `subprocess.Popen`."""

    def __init__(
        self, channel: socket.socket, pid: int, command: list[str], descriptor: int, env: Mapping[str, str]
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        reader, writer = os.pipe()
        self.stderr = open(reader, "rb")  # noqa: SIM115
        message = json.dumps([json.loads(command[-3]), int(command[-1]), dict(env)]).encode()
        socket.send_fds(channel, [len(message).to_bytes(8, "little")], [descriptor, writer])
        channel.sendall(message)
        channel.close()
        os.close(writer)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _become_server(channel: socket.socket) -> NoReturn:
    """Wait until the command starts its fork server; end with the command if it starts none."""
    size, descriptors, _, _ = socket.recv_fds(channel, 8, 2)
    if not size:
        os._exit(0)
    content = b""
    while len(content) < int.from_bytes(size, "little"):
        content += channel.recv(1 << 16)
    path, parent, environment = json.loads(content)
    channel.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (descriptors[1], 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.stdout, sys.stderr = (_text(1, line_buffering=False), _text(2, line_buffering=True))
    from hyper_parallel.launch.server import main

    code = 0
    try:
        main(descriptors[0], parent)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)
