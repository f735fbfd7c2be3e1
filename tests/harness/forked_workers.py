"""The fork server of a forked command: a fork, too, that waits until the command starts one.

It is forked before the command has done anything, as the process that `launch.worker_supervisor` starts has not.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NoReturn

from harness.fork_server import fork_context


def fork_server_of_workers() -> None:
    """Fork a process now, while there is one thread, that becomes the fork server of the command when it starts one."""
    from hyper_parallel.launch import worker_supervisor

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_server(theirs)
    theirs.close()
    standby = [(ours, pid)]

    def popen(command: list[str], *, pass_fds: Sequence[int] = (), **options: Any) -> Any:
        if not standby or worker_supervisor._BOOT not in command:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        return _ServerProcess(*standby.pop(), command, pass_fds[0], options["env"])

    worker_supervisor.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )


class _ServerProcess:
    """What `launch.worker_supervisor` uses of `subprocess.Popen`."""

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
    sys.stdout, sys.stderr = (text_stream(1, line_buffering=False), text_stream(2, line_buffering=True))
    from hyper_parallel.launch.fork_server import main

    code = 0
    try:
        main(descriptors[0], parent)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def text_stream(descriptor: int, line_buffering: bool) -> io.TextIOWrapper:
    """An open file as one of the standard streams."""
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


class ForkedServer:
    """A fork server of the test process itself: what `launch.worker_supervisor` uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        reader, writer = os.pipe()
        self.stderr = open(reader, "rb")  # noqa: SIM115
        channel, errors = Connection(os.dup(pass_fds[0])), Connection(writer, readable=False)
        path = json.loads(command[-3])
        self._process = fork_context().Process(
            target=_serve, args=(channel, errors, path, dict(env)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        channel.close()
        errors.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(channel: Connection, errors: Connection, path: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (errors.fileno(), 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    descriptor = os.dup(channel.fileno())
    channel.close()
    from hyper_parallel.launch.fork_server import main

    main(descriptor, os.getppid())
