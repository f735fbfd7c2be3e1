"""Standard streams whose loss does not end a run: closed pipes (`| head`), full disks, streams closed by the caller.

A run's results are its files. So a stream that refuses a write is replaced by the null device, on its own descriptor,
and one line says so where a line can still be read; what native code writes to it later is lost in silence, too. For a
command whose output is its result (`generate`, `plan`) the line is its end.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from hyper_parallel.errors import FaultError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)

Lost = Callable[[OSError], None]
"""Called once, after a stream was replaced by the null device, with the reason; may raise, and the write then does."""


class _LastingFile(io.FileIO):
    """A descriptor that becomes the null device when the system refuses a write."""

    def __init__(self, descriptor: int, lost: Lost, closefd: bool) -> None:
        super().__init__(descriptor, "w", closefd=closefd)
        self._lost = lost

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            # None: another program made the pipe non-blocking, and it is full.
            while (count := super().write(data)) is None:
                select.select([], [self.fileno()], [])
            return count
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._lost(error)
            return memoryview(data).nbytes


def lasting(descriptor: int, lost: Lost, *, closefd: bool = True) -> TextIO:
    """A text stream on a descriptor that outlives what the descriptor leads to."""
    raw = _LastingFile(descriptor, lost, closefd)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


def result_is_lost(error: OSError) -> None:
    """End a command whose result is its output."""
    raise FaultError(f"cannot write to standard output: {error.strerror}") from error


def _unless_left(error: OSError) -> None:
    """A reader that has seen enough (`| head`) is no fault: the command ends without a line."""
    if isinstance(error, BrokenPipeError):
        raise error
    result_is_lost(error)


def loss_line(error: OSError | None, kept: str) -> str:
    """The line about lost standard output. `kept`: what has the results (`Wording.kept`); no error: it was closed."""
    why = "is closed" if error is None else f"can no longer be written to ({error.strerror})"
    return f"standard output {why}; the run goes on, and {kept}"


def open_standard_streams() -> bool:
    """Open closed standard descriptors on the null device; whether standard output was closed.

    Otherwise the next files, sockets and pipes of this process get the numbers 0 to 2, and are written to as such.
    From here on errors that cannot be shown change no exit code, and output that cannot be written is one line.
    """
    closed = set()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.add(os.open(os.devnull, os.O_RDWR))
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the end
    elif sys.stdout is sys.__stdout__:
        sys.stdout = lasting(1, _unless_left, closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - until the end
    elif sys.stderr is sys.__stderr__:
        sys.stderr = lasting(2, lambda error: None, closefd=False)
    return 1 in closed


_was_closed = False
_own: TextIO | None = None
"""Standard output as `begin` opened it."""


def begin() -> None:
    """`open_standard_streams` for the command line, once."""
    global _was_closed, _own
    before = sys.stdout
    _was_closed = open_standard_streams()
    if sys.stdout is not before:
        _own = sys.stdout


@contextlib.contextmanager
def lasting_stdout(kept: str | None) -> Iterator[None]:
    """Inside, this process's loss of standard output is a line on standard error. `kept` is as of `loss_line`; with
    None a loss stays an error. After `begin`.
    """
    if kept is None or _own is None or sys.stdout is not _own:  # replaced by an owner who reads it
        yield
        return

    def lost(error: OSError | None) -> None:
        sys.stderr.write(f"hyper-parallel: {loss_line(error, kept)}\n")

    if _was_closed:
        lost(None)
        yield
        return
    _own.flush()
    sys.stdout = lasting(1, lost, closefd=False)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = _own
