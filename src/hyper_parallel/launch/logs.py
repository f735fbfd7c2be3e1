"""A log file for each rank, through the standard `logging` module, and the terminal's output.

Everything goes to `<out>/logs/rank-<n>.log`, with the step and the micro-batch it happened in. Rank 0 also
shows warnings of this project, and errors of anything, on the terminal. What native libraries write to file
descriptors 1 and 2 goes to the log on every rank; `print` reaches the terminal on rank 0 only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from hyper_parallel.errors import LaunchError
from hyper_parallel.standard_streams import lasting, loss_line, result_is_lost
from hyper_parallel.untrusted_files import open_to_append

_log = logging.getLogger(__name__)
_position: ContextVar[Callable[[], str]] = ContextVar("position", default=str)

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(position)s%(name)s: %(message)s"


@contextlib.contextmanager
def at(step: int, micro: int | None = None, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Log records inside this context carry the step, and the micro-batch if given, or what `where` returns then."""

    def words() -> str:
        more = where() if where is not None else "" if micro is None else f"micro {micro}"
        return f"step {step} {more} " if more else f"step {step} "

    token = _position.set(words)
    try:
        yield
    finally:
        _position.reset(token)


def path_of(out: str | Path, rank: int) -> Path:
    """The log file of a rank."""
    return Path(out) / "logs" / f"rank-{rank}.log"


@contextlib.contextmanager
def recording(path: Path, terminal: tuple[int, int] | None, kept: str | None = None) -> Iterator[None]:
    """Send logging, warnings, `print` and native output to `path` while inside.

    `terminal` has the file descriptors of standard output and error for the rank that prints (rank 0); with None
    everything goes to the file. `kept` (`Wording.kept`): the loss of the terminal is a line, and not an error. Raises
    LaunchError when the file cannot be opened.
    """
    with _opened(path) as file, contextlib.ExitStack() as undo:
        if terminal is not None:
            out, error = (os.dup(descriptor) for descriptor in terminal)
            _tell_size(out)
            _redirect_descriptors(file, undo)
            undo.enter_context(contextlib.redirect_stdout(_output(out, kept, undo)))
            undo.enter_context(contextlib.redirect_stderr(undo.enter_context(lasting(error, _lost_errors))))
        else:
            _redirect_descriptors(file, undo)
            undo.enter_context(contextlib.redirect_stdout(file))
            undo.enter_context(contextlib.redirect_stderr(file))
        _take_over_logging(file, terminal is not None, undo)
        faulthandler.enable(file)
        undo.callback(faulthandler.disable)
        yield


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(open_to_append(path), "a", buffering=1, errors="backslashreplace")
    except OSError as error:
        raise LaunchError(
            f"cannot write the log {path}: {error.strerror}; move what is there, or set 'out'"
        ) from error


class _File(logging.StreamHandler[TextIO]):
    """Writes to the log. Ignores a full disk, which ends the run elsewhere with one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Terminal(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces while it draws."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "terminal", True):
            return False
        ours = record.name.split(".")[0] == "hyper_parallel"
        return record.levelno >= (logging.WARNING if ours else logging.ERROR)


def _add_position(record: logging.LogRecord) -> bool:
    record.position = _position.get()()
    return True


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    """Logs the failure of a library's thread; the code that waits for the thread reports the consequence."""
    name = failed.thread.name if failed.thread is not None else "unknown"
    error = failed.exc_value or failed.exc_type()
    _log.error("the thread %s ended", name, exc_info=error, extra={"terminal": False})


def _take_over_logging(file: TextIO, show: bool, undo: contextlib.ExitStack) -> None:
    to_file = _File(file)
    to_file.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
    to_file.addFilter(_add_position)
    handlers: list[logging.Handler] = [to_file]
    if show:
        terminal = _Terminal()
        terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers.append(terminal)

    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    root.handlers = handlers
    root.setLevel(logging.INFO)
    undo.callback(setattr, root, "handlers", before[0])
    undo.callback(root.setLevel, before[1])
    # PyTorch and Transformers write to stderr through handlers of their own; here they go the common way.
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(
            isinstance(handler, logging.StreamHandler) for handler in logger.handlers
        ):
            undo.callback(setattr, logger, "handlers", logger.handlers)
            undo.callback(setattr, logger, "propagate", logger.propagate)
            logger.handlers, logger.propagate = [], True
    undo.callback(setattr, threading, "excepthook", threading.excepthook)
    threading.excepthook = _log_thread
    logging.captureWarnings(True)
    undo.callback(logging.captureWarnings, False)


def _redirect_descriptors(file: TextIO, undo: contextlib.ExitStack) -> None:
    for descriptor in (1, 2):
        saved = os.dup(descriptor)
        undo.callback(os.close, saved)
        undo.callback(os.dup2, saved, descriptor)
        os.dup2(file.fileno(), descriptor)


def _output(descriptor: int, kept: str | None, undo: contextlib.ExitStack) -> TextIO:
    if kept is None:
        return undo.enter_context(lasting(descriptor, result_is_lost))

    def lost(error: OSError) -> None:
        _log.warning("%s", loss_line(error, kept))

    return undo.enter_context(lasting(descriptor, lost))


def _lost_errors(error: OSError) -> None:
    _log.warning("standard error can no longer be written to: %s", error.strerror, extra={"terminal": False})


def _tell_size(descriptor: int) -> None:
    # With descriptors 0 to 2 away from the terminal, programs that ask for its width look here.
    if os.isatty(descriptor):
        size = os.get_terminal_size(descriptor)
        if size.columns:
            os.environ.setdefault("COLUMNS", str(size.columns))
            os.environ.setdefault("LINES", str(size.lines))


def tail(path: Path, size: int = 64 * 1024) -> str:
    """The last `size` bytes of a log, from a line's beginning; empty if there is no log."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if end <= size else text.partition("\n")[2]
