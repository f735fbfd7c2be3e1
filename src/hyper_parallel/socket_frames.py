"""Frames on a stream socket: the length of a message in 8 bytes (little endian), then its bytes.

What a message is, JSON or a pickle, is the callers'. The sockets are private to two processes: they are inherited and
have no address.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque

_HEAD = 8
_CHUNK = 1 << 20


def framed(body: bytes) -> bytes:
    """A message as it is sent."""
    return len(body).to_bytes(_HEAD, "little") + body


def read_frame(end: socket.socket) -> bytearray | None:
    """Wait for a message; None when the other end has gone."""
    head = _exactly(end, _HEAD)
    return None if head is None else _exactly(end, int.from_bytes(head, "little"))


def _exactly(end: socket.socket, size: int) -> bytearray | None:
    held = bytearray(size)
    view, got = memoryview(held), 0
    while got < size:
        try:
            more = end.recv_into(view[got:])
        except ConnectionError:
            return None
        if not more:
            return None
        got += more
    return held


class FrameEnd:
    """An end that never waits, since a process that is stopped neither reads nor writes."""

    def __init__(self, end: socket.socket, largest: int | None = None) -> None:
        """`largest`: bytes of a message, beyond which what came is none, and the end counts as closed."""
        self._end, self._largest = end, largest
        end.setblocking(False)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self.open = True

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._end.fileno()

    @property
    def writes(self) -> bool:
        """Whether something is left to be sent."""
        return self.open and bool(self._out)

    def put(self, body: bytes) -> None:
        """Send a message as far as the other end takes it; `flush` sends the rest."""
        self._out.append(memoryview(framed(body)))
        self.flush()

    def flush(self) -> None:
        """Send more of what is left."""
        try:
            while self.open and self._out:
                sent = self._end.send(self._out[0][:_CHUNK])
                self._out[0] = self._out[0][sent:]
                if not self._out[0]:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            # It has gone, or has a part of a message that nothing can follow: reading says so, at both ends.
            self._out.clear()
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[bytearray]:
        """The messages that are complete now; `open` is False once the other end has gone."""
        try:
            while self.open and (self._largest is None or len(self._in) < self._largest + _HEAD):
                more = self._end.recv(_CHUNK)
                if not more:
                    self.open = False
                self._in += more
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        found: list[bytearray] = []
        begin = 0
        while len(self._in) - begin >= _HEAD:
            size = int.from_bytes(self._in[begin : begin + _HEAD], "little")
            if self._largest is not None and size > self._largest:
                self.open = False
                break
            end = begin + _HEAD + size
            if len(self._in) < end:
                break
            found.append(self._in[begin + _HEAD : end])
            begin = end
        del self._in[:begin]
        return found

    def close(self) -> None:
        """Nothing more is sent or received."""
        self.open = False
        self._end.close()
