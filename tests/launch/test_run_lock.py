"""One run a folder: refused before anything is written, and no obstacle once the run's processes are gone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commands import make_config, running, wait_until
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import run
from hyper_parallel.launch.run_folder import NAME, run_lock

HOLD = (
    "import sys, time; from hyper_parallel.launch.run_folder import run_lock\n"
    "with run_lock(sys.argv[1]): print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the folder `run`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_with_the_first_one_named(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    (tmp_path / "run" / "metrics.jsonl").write_text("kept\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(LaunchError, match=rf"process {other.pid} on .*, since 20.*'out'") as refused:
        run(make_config(tmp_path, {"shard": 2}), "harness.targets:note")
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "run" / "logs").exists()


def test_a_run_that_is_killed_is_no_obstacle(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    wait_until(lambda: not running(other.pid), "the process is dead")
    assert (tmp_path / "run" / NAME).exists()
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / NAME).exists()


def test_one_of_many_holds_it_at_a_time(tmp_path: Path) -> None:
    # Files that come and go: a lock on one that was removed meanwhile is worth nothing.
    inside, most, held = [0], [0], [0]
    stop = time.monotonic() + 1.0

    def try_often() -> None:
        while time.monotonic() < stop:
            try:
                with run_lock(tmp_path):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    held[0] += 1
                    time.sleep(0.0005)
                    inside[0] -= 1
            except LaunchError:
                pass

    threads = [threading.Thread(target=try_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and held[0] > 1


def _no_locks(*arguments: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("host", "alive", "refused"), [("here", False, False), ("here", True, True), ("elsewhere", False, True)]
)
def test_without_locks_the_file_stands_for_one(
    host: str,
    alive: bool,
    refused: bool,
    tmp_path: Path,
    other: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    if not alive:
        other.kill()
        other.wait()
    signed = {"pid": other.pid, "host": socket.gethostname() if host == "here" else host, "since": "today"}
    (tmp_path / "run" / NAME).write_text(json.dumps(signed))
    if refused:
        with (
            pytest.raises(LaunchError, match=rf"process {other.pid} .* remove {tmp_path}"),
            run_lock(tmp_path / "run"),
        ):
            pass
    else:
        with run_lock(tmp_path / "run"):
            pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with (
        pytest.raises(LaunchError, match=r"cannot write to the run's folder .*; set 'out'"),
        run_lock(tmp_path / "run"),
    ):
        pass
