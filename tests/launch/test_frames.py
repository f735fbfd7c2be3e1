"""Messages between two processes: whole, within a limit, or the end of the connection."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import pytest

from hyper_parallel.socket_frames import FrameEnd, framed, read_frame


def test_messages_arrive_whole_and_in_order() -> None:
    here, there = socket.socketpair()
    with here, there:
        end = FrameEnd(here)
        big = os.urandom(3 << 20)
        reader: list[Any] = []
        thread = threading.Thread(target=lambda: reader.extend(read_frame(there) for _ in range(3)))
        thread.start()
        for body in (b"", big, b"last"):
            end.put(body)
        while end.writes:
            end.flush()
        thread.join(20)
        assert [bytes(body) for body in reader] == [b"", big, b"last"]
        there.sendall(framed(b"one") + framed(b"two") + framed(b"three")[:5])
        assert end.receive() == [b"one", b"two"] and end.open


def test_no_more_is_read_than_a_message_may_have() -> None:
    here, there = socket.socketpair()
    limit = 1 << 20
    end = FrameEnd(here, limit)
    flood = threading.Thread(target=_send_until_closed, args=(there,))
    flood.start()
    try:
        found: list[bytearray] = []
        while end.open and len(end._in) <= 4 * limit:
            found += end.receive()
        assert not found and not end.open
        assert len(end._in) <= 2 * limit + 8
    finally:
        end.close()
        flood.join(20)
        there.close()
    assert not flood.is_alive()


def _send_until_closed(end: socket.socket) -> None:
    try:
        while True:
            end.sendall(b"\xff" * (1 << 20))
    except OSError:
        return


def test_a_message_that_was_cut_ends_the_connection() -> None:
    here, there = socket.socketpair()
    with here, there:
        end = FrameEnd(_Fails(here))  # type: ignore[arg-type]
        end.put(b"x" * 100)
        end.put(b"another")
        assert not end.writes
        assert read_frame(there) is None
        assert end.receive() == [] and not end.open


class _Fails:
    """A socket whose buffers run out behind the first ten bytes."""

    def __init__(self, real: socket.socket) -> None:
        self._real, self._sent = real, False

    def send(self, data: memoryview) -> int:
        if self._sent:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        self._sent = True
        return self._real.send(data[:10])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_length_beyond_the_limit_is_no_message() -> None:
    here, there = socket.socketpair()
    with here, there:
        end = FrameEnd(here, 16)
        there.sendall(framed(b"y" * 17))
        assert end.receive() == [] and not end.open


@pytest.mark.parametrize("status", [-35, -9, -15])
def test_every_signal_has_a_name(status: int) -> None:
    from hyper_parallel.launch.worker_failure import Failure

    assert "SIG" in Failure.of_exit(0, status).text or f"signal {-status}" in Failure.of_exit(0, status).text
