"""Workers of the runs here are forks of the tests' fork server, whose caches are full (`harness.preloaded`).

A worker's first step takes a third of the time. The library's own fork server is started by tests/launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from harness.fork_server import fork_context
from hyper_parallel.launch import forkserver
from hyper_parallel.launch.server import main


@pytest.fixture(autouse=True, scope="package")
def warm_workers() -> Iterator[None]:
    """This package has a fork server of its own."""
    popen = SimpleNamespace(Popen=_ForkedServer, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "_server", None)
        patch.setattr(forkserver, "subprocess", popen)
        yield
        if forkserver._server is not None:
            forkserver._server.close()


class _ForkedServer:
    """What `launch.forkserver` uses of `subprocess.Popen`."""

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
    main(descriptor, os.getppid())
