"""Questions in a fork: whatever a computation tries costs its own answer only."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel.rl.rewards import process_limits

needs_filter = pytest.mark.skipif(not process_limits.computing_only(), reason="no filter for this machine")


def test_answers() -> None:
    values = list(range(1000))
    assert process_limits.ask(lambda: sum(values) == 499_500) is True
    assert process_limits.ask(lambda: sum(values) == 1) is False


def _raise() -> bool:
    raise ValueError


@pytest.mark.parametrize(
    "question",
    [
        _raise,
        lambda: bytearray(1 << 30) is not None,
        lambda: all(True for _ in iter(int, 1)),
        lambda: time.sleep(100) is None,
        lambda: ctypes.string_at(0) == b"",
        lambda: os._exit(0),
    ],
    ids=["raises", "memory", "processor", "sleeps", "crashes", "exits"],
)
def test_no_answer(question: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "WALL_S", 2.0)
    start = time.monotonic()
    assert process_limits.ask(question) is None
    assert time.monotonic() - start < 10


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return True
    return False


@needs_filter
def test_nothing_outside_is_reached(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    calls: list[Callable[[], object]] = [
        lambda: (tmp_path / "new").open("w"),
        lambda: kept.open("a"),
        lambda: kept.unlink(),
        lambda: kept.chmod(0o777),
        lambda: (tmp_path / "folder").mkdir(),
        lambda: os.rename(kept, tmp_path / "other"),
        lambda: os.kill(os.getppid(), 0),
        os.fork,
        lambda: os.execv("/bin/true", ["true"]),
        socket.socket,
        lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
    ]
    for number, call in enumerate(calls):
        assert process_limits.ask(lambda call=call: _refused(call)) is True, number
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert process_limits.ask(lambda: kept.read_text() == "kept") is True  # modules may be imported late


def test_open_files_of_this_process_are_closed() -> None:
    reading, writing = os.pipe()
    assert process_limits.ask(lambda: _refused(lambda: os.write(writing, b"forged"))) is True
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
