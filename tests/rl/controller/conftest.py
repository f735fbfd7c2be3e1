"""Workers of the runs here are forks of the tests' fork server, whose caches are full (`harness.preloaded`).

A worker's first step takes a third of the time. The library's own fork server is started by tests/launch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.forked_workers import ForkedServer
from hyper_parallel.launch import worker_supervisor


@pytest.fixture(autouse=True, scope="module")
def warm_workers() -> Iterator[None]:
    """This module has a fork server of its own."""
    popen = SimpleNamespace(Popen=ForkedServer, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_supervisor, "_server", None)
        patch.setattr(worker_supervisor, "subprocess", popen)
        yield
        if worker_supervisor._server is not None:
            worker_supervisor._server.close()
