"""Messages between a worker of a group and its engine, and their framing on a socket.

A message is a pickled tuple behind its length (8 bytes, little endian). To the worker:

    ("call", number, list)               execute a list: pairs of an operation and its keyword arguments, pickled
    ("end",)                             leave

From the worker; each carries the number of its call, so that an answer is never taken for that of another call:

    ("at", number, place)                begins the instruction at this place in its list
    ("done", number, results)            the answer, pickled; call 0 is the making of the host object
    ("failed", number, place, report)    the list ended there; `WorkerReport`

The socket is private to the two processes: it is inherited, has no address, and no other process can reach it.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

from hyper_parallel import errors
from hyper_parallel.errors import HyperParallelError, LaunchError
from hyper_parallel.launch.failure import Failure

_HEAD = 8
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A failed instruction."""

    failure: Failure
    error_class: str
    """The class of `hyper_parallel.errors` to raise in the controller."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> WorkerReport:
        """Of an exception that was just caught."""
        return cls(failure=Failure.of(rank, error), error_class=error_class(error))


def error_class(error: BaseException) -> str:
    """The name of the most specific class of `hyper_parallel.errors` that the error is and a text alone can make."""
    for found in type(error).__mro__:
        if found.__module__ == errors.__name__ and found is not errors.WorkersFailedError:
            return found.__name__
    return HyperParallelError.__name__


class _Plain(pickle.Pickler):
    """Refuses what would make the controller import torch."""

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] == "torch":
            raise LaunchError(
                f"a worker's result holds a {kind.__module__}.{kind.__qualname__}, and a controller has no torch; "
                "return plain data, for instance with tolist()"
            )
        return NotImplemented


def plain(data: Any) -> bytes:
    """Data of a list or an answer, pickled. Raises LaunchError for a tensor, and what pickle raises."""
    file = io.BytesIO()
    _Plain(file, protocol=pickle.HIGHEST_PROTOCOL).dump(data)
    return file.getvalue()


def packed(message: tuple[Any, ...]) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_HEAD, "little") + body


class WorkerEnd:
    """The worker's end: it waits."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: tuple[Any, ...]) -> None:
        """Raises OSError when the engine has gone."""
        self._end.sendall(packed(message))

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None when the engine has gone."""
        head = self._exactly(_HEAD)
        body = self._exactly(int.from_bytes(head, "little")) if head is not None else None
        return None if body is None else pickle.loads(body)

    def _exactly(self, size: int) -> bytearray | None:
        held = bytearray(size)
        view, got = memoryview(held), 0
        while got < size:
            try:
                more = self._end.recv_into(view[got:])
            except ConnectionError:
                return None
            if not more:
                return None
            got += more
        return held


class EngineEnd:
    """The engine's end: it never waits, since a worker that is stopped neither reads nor writes."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
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

    def put(self, message: bytes) -> None:
        """Send a packed message as far as the worker takes it; `flush` sends the rest."""
        self._out.append(memoryview(message))
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
            self._out.clear()  # the worker has gone; reading says so

    def receive(self) -> list[tuple[Any, ...]]:
        """The messages that are complete now; `open` is False once the worker has gone."""
        try:
            while self.open:
                more = self._end.recv(_CHUNK)
                if not more:
                    self.open = False
                self._in += more
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        found: list[tuple[Any, ...]] = []
        begin = 0
        while len(self._in) - begin >= _HEAD:
            end = begin + _HEAD + int.from_bytes(self._in[begin : begin + _HEAD], "little")
            if len(self._in) < end:
                break
            found.append(pickle.loads(memoryview(self._in)[begin + _HEAD : end]))
            begin = end
        del self._in[:begin]
        return found

    def close(self) -> None:
        """Nothing more is sent or received."""
        self.open = False
        self._end.close()
