"""Joining a cluster that runs already, by its address."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.role_groups import STARTS_S

pytestmark = pytest.mark.timeout(900)

JOINS = """
import sys
from pathlib import Path
from harness.role_groups import STARTS_S, do, group_config
from hyper_parallel.launch.roles.ray_engine import RayEngine
with RayEngine(sys.argv[1]) as engine:
    group = engine.start(group_config(Path(sys.argv[2]), "actor"), timeout_s=STARTS_S)
    print(group.call([do("total", value=1.0)], timeout_s=STARTS_S).result())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
    # Ray's own range for workers may have the port that was free.
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    head = subprocess.Popen(
        [*command, f"--port={port}", "--include-dashboard=false", "--node-ip-address=127.0.0.1"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert head.stdout is not None
        told = []
        for line in head.stdout:
            told.append(line)
            if "--block" in line or "runtime started" in line:
                break
        else:
            pytest.fail("Ray did not start: " + "".join(told))
        yield f"127.0.0.1:{port}", environ
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


def joined(
    cluster: tuple[str, dict[str, str]], folder: Path, **changed: str
) -> subprocess.CompletedProcess[str]:
    address, environ = cluster
    return subprocess.run(
        [sys.executable, "-c", JOINS, address, str(folder)],
        env={**environ, **changed},
        capture_output=True,
        text=True,
        timeout=4 * STARTS_S,
    )


def test_a_controller_joins_and_leaves_and_another_one_finds_the_place_free(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    for turn in range(2):
        done = joined(cluster, tmp_path / str(turn))
        # Ray may print lines of its own behind it.
        assert done.returncode == 0, done.stderr
        assert "[[3.0], [3.0]]" in done.stdout.splitlines(), done.stdout


def test_a_cluster_that_is_not_there_is_told_at_once(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = joined((address, cluster[1]), tmp_path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert f"cannot join the Ray cluster at {address}: nothing answers at " in line
    assert line.endswith("; start it there with `ray start --head`, or give the address that it printed")


def test_a_controller_with_another_token_is_refused(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    done = joined(cluster, tmp_path, RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert done.returncode == 1
    assert f"cannot join the Ray cluster at {cluster[0]}: " in done.stderr.splitlines()[-1]
