"""Stop and save requests to a run: the flags, and the signals that set them.

A request reaches ranks at different moments. Ranks therefore agree before they act on one: the training step reduces
the flags (`step.recipe`), so that all ranks stop or save after the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request a run to save and end."""
SAVE = signal.SIGUSR1
"""The signal that requests a run to save and continue."""
WAKE = signal.SIGURG
"""The control thread's signal to the main thread; without a handler a process ignores it."""
REPEAT_S = 1.0
"""A signal repeated within this time is the same request: launchers, and kills of a whole group, may signal a process
twice.
"""

_CALLED_BY_OTHERS = ("__torch_dispatch__", "__torch_function__", "__del__", "remove")
"""Functions that PyTorch's operations call, or the interpreter's destructors; ``remove`` is the callback of weak
dictionaries.
"""
_AUTOGRAD = os.path.join("torch", "autograd", "function.py")
"""Its ``apply`` calls custom autograd functions from C++, which may abort on an exception."""

_stop = threading.Event()
_save = threading.Event()
_disarmed = threading.Event()
_saved_at = float("-inf")
_interruptible = False
_ending = False
_interrupted = False


class Requests(NamedTuple):
    """The requests to this rank, which the others may not know yet."""

    stop: bool = False
    save: bool = False


def stop_requested() -> bool:
    """Whether this worker got a stop request. Ranks see it at different times: reduce it first."""
    return _stop.is_set()


def requests() -> Requests:
    """The open requests to this worker."""
    return Requests(_stop.is_set(), _save.is_set())


def request_stop() -> None:
    """Request this worker to stop, as a signal does; also called once the ranks agreed on another rank's request."""
    _stop.set()


def request_save() -> None:
    """Request this worker to save after the current step. A request right after a requested save counts as the same
    one.
    """
    if time.monotonic() - _saved_at > REPEAT_S:
        _save.set()


def save_served() -> None:
    """Mark the save request as done, on every rank, once all ranks have agreed to save."""
    global _saved_at
    _save.clear()
    _saved_at = time.monotonic()


def request_end() -> None:
    """Make the main thread raise KeyboardInterrupt at the next `interrupt`: another worker has failed."""
    global _ending
    _ending = True


def reset() -> None:
    """Clear all requests when a run begins."""
    global _ending, _interrupted, _interruptible, _saved_at
    for event in (_stop, _save, _disarmed):
        event.clear()
    _ending = _interrupted = _interruptible = False
    _saved_at = float("-inf")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside this context there is nothing to save: a stop request, even an earlier one, raises KeyboardInterrupt at
    once.

    Every rank must leave this context before any rank finishes a step. Only the main thread is interrupted.
    """
    global _interruptible
    _interruptible = threading.current_thread() is threading.main_thread()
    try:
        interrupt()
        yield
    finally:
        _interruptible = False


def must_interrupt() -> bool:
    """Whether the main thread must still be interrupted."""
    requested = _ending or (_interruptible and _stop.is_set())
    return requested and not _interrupted and not _disarmed.is_set()


def interrupt(frame: FrameType | None = None) -> None:
    """Raise KeyboardInterrupt if the worker must leave at once. Called on the main thread, with its interrupted
    `frame`.

    It is raised once, so that files and memory are released on the way out, and not at all if an error is already
    propagating. It is also not raised inside a PyTorch operation that calls Python, where fake tensors would be left
    in an inconsistent state and the process would abort, nor in a destructor, which swallows exceptions. The caller
    tries again.
    """
    global _ending, _interrupted, _interruptible
    if must_interrupt() and sys.exc_info()[1] is None and not _called_by_others(frame):
        _ending = _interruptible = False
        _interrupted = True
        raise KeyboardInterrupt


def _called_by_others(frame: FrameType | None) -> bool:
    """Whether the running code was called by code that cannot propagate an exception."""
    while frame is not None:
        name = frame.f_code.co_name
        if name in _CALLED_BY_OTHERS or (name == "apply" and frame.f_code.co_filename.endswith(_AUTOGRAD)):
            return True
        frame = frame.f_back
    return False


def disarm() -> None:
    """From now on nothing is interrupted: the worker's target is done."""
    global _ending, _interruptible
    _ending = _interruptible = False
    _disarmed.set()


def interrupted() -> bool:
    """Whether `interrupt` has raised in this run: later failures are consequences of it."""
    return _interrupted


@contextlib.contextmanager
def listening(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Inside this context the first of `signals` sets the flag, and a second one raises KeyboardInterrupt; `SAVE`
    requests a checkpoint. For the user's own process; workers have a control thread (`launch.control`).
    """
    reset()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            request_save()
            return
        if _stop.is_set():
            raise KeyboardInterrupt
        _stop.set()
        interrupt(frame)

    with handling(dict.fromkeys(signals, handle)):
        yield


@contextlib.contextmanager
def handling(handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Install signal handlers, and restore the previous ones at the end. Does nothing outside the main thread.

    An ignored signal (such as SIGHUP under nohup) stays ignored, except SIGINT, which shells ignore for background
    processes and which the launcher then sends on purpose.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    for number, handler in handlers.items():
        if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
            continue
        previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
