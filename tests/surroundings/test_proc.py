"""Locks and limits of the system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel import proc
from hyper_parallel.data import cache
from hyper_parallel.errors import LaunchError
from hyper_parallel.graph import artifacts
from hyper_parallel.proc import LockWait, lock_holder, room_for_files, try_lock


@contextlib.contextmanager
def _left_behind(path: Path, waited_for: bool) -> Iterator[int]:
    """A lock whose holder has ended, while a process that it forked has the file open still."""
    ready, said = os.pipe()
    holder = os.fork()
    if holder == 0:
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(said, f"{child}\n".encode())
        os._exit(0)
    os.waitid(os.P_PID, holder, os.WEXITED | (0 if waited_for else os.WNOWAIT))
    child = int(os.read(ready, 20))
    try:
        yield holder
    finally:
        if not waited_for:
            os.waitpid(holder, 0)
        os.kill(child, 9)
        os.close(ready)
        os.close(said)


def test_a_lock_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    assert lock_holder(path) is None and lock_holder(tmp_path / "none") is None
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holder(path) == os.getpid()
    assert lock_holder(path) is None


def test_one_descriptor_has_the_lock_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as first, path.open() as second:
        assert try_lock(first.fileno()) is True and try_lock(second.fileno()) is False
        first.close()
        assert try_lock(second.fileno()) is True

        def says(number: int) -> None:
            def flock(*_: object) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(fcntl, "flock", flock)

        for number in (errno.ENOLCK, errno.EOPNOTSUPP):
            says(number)
            assert try_lock(second.fileno()) is None, "a file system without locks"
        says(errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            try_lock(second.fileno())


def test_a_wait_is_said_once_with_path_and_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "SAID_S", 0.0)
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as file, caplog.at_level(logging.INFO):
        fcntl.flock(file, fcntl.LOCK_EX)
        wait = LockWait(path)
        assert not wait.holder_ended() and not wait.holder_ended()
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for the lock {path}, which process {os.getpid()} holds"
    ]


def test_nothing_is_said_of_a_short_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wait = LockWait(tmp_path / "a.lock")
    assert not wait.holder_ended() and not caplog.records


@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "zombie"])
def test_a_lock_of_a_dead_holder_is_taken_over(
    waited_for: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "SAID_S", 0.1)
    with _left_behind(tmp_path / "a.lock", waited_for) as holder:
        with cache._locked(tmp_path / "a.lock", timeout=20) as alone:
            assert not alone  # works without it: building twice is slower, never wrong
        assert f"left over from process {holder}, which has ended" in caplog.text
        wait = LockWait(tmp_path / "a.lock")
        with artifacts._locked(tmp_path / "a.lock", wait) as first:
            assert not first
        wait._began = 0.0
        with artifacts._locked(tmp_path / "a.lock", wait) as second:
            assert second


def test_the_limit_on_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(24, 5000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    room_for_files(8)
    assert limits[-1] == (4096, 5000)
    limits.append((24, 30))
    with pytest.raises(
        LaunchError, match=r"may open 30 files, and 8 workers need 192; raise the limit \(ulimit -n"
    ):
        room_for_files(8)
