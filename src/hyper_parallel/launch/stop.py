"""Requests to a run: to stop, or to save a checkpoint and go on. Flags, and the signals that set them.

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
"""Signals that ask a run to save and end."""
SAVE = signal.SIGUSR1
"""The signal that asks a run to save and go on."""
WAKE = signal.SIGURG
"""The control thread's signal to the main thread. By itself it does nothing to a process."""
REPEAT_S = 1.0
"""A signal that is repeated within this time is the same request: launchers, and kills of a whole group, reach a
process by more than one way."""

_CALLED_BY_OTHERS = ("__torch_dispatch__", "__torch_function__", "__del__", "remove")
"""Functions that PyTorch's operations call, or the interpreter when it lets go of an object; ``remove`` is what weak
dictionaries call theirs."""
_AUTOGRAD = os.path.join("torch", "autograd", "function.py")
"""Whose ``apply`` calls custom functions of autograd from C++, which aborts for an exception at some of its moments."""

_stop = threading.Event()
_save = threading.Event()
_disarmed = threading.Event()
_saved_at = float("-inf")
_interruptible = False
_ending = False
_interrupted = False


class Requests(NamedTuple):
    """What this rank was asked to do, which the others may not know yet."""

    stop: bool = False
    save: bool = False


def stop_requested() -> bool:
    """Whether this worker was asked to stop (Ctrl-C, SIGTERM, SIGHUP). Ranks hear it at different moments: agree
    first.
    """
    return _stop.is_set()


def requests() -> Requests:
    """What this worker was asked and has not done yet."""
    return Requests(_stop.is_set(), _save.is_set())


def request_stop() -> None:
    """Ask this worker to stop, as a signal does; also to be called when another rank's request was agreed on."""
    _stop.set()


def request_save() -> None:
    """Ask this worker to save after the step at hand. What comes right after a save that was asked for is that request,
    by another way."""
    if time.monotonic() - _saved_at > REPEAT_S:
        _save.set()


def save_served() -> None:
    """All ranks have agreed to save because one was asked: the request is done, on whichever rank it came in."""
    global _saved_at
    _save.clear()
    _saved_at = time.monotonic()


def request_end() -> None:
    """Have the main thread raise KeyboardInterrupt at the next `interrupt`: another worker has failed."""
    global _ending
    _ending = True


def reset() -> None:
    """No request is open: a run begins."""
    global _ending, _interrupted, _interruptible, _saved_at
    for event in (_stop, _save, _disarmed):
        event.clear()
    _ending = _interrupted = _interruptible = False
    _saved_at = float("-inf")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While inside, there is nothing to save: a request to stop raises KeyboardInterrupt at once, also one that came
    before.

    Every rank must leave such a part before any rank finishes a step. Only the main thread is interrupted.
    """
    global _interruptible
    _interruptible = threading.current_thread() is threading.main_thread()
    try:
        interrupt()
        yield
    finally:
        _interruptible = False


def must_interrupt() -> bool:
    """Whether the main thread is to leave what it does, and was not told to yet."""
    asked = _ending or (_interruptible and _stop.is_set())
    return asked and not _interrupted and not _disarmed.is_set()


def interrupt(frame: FrameType | None = None) -> None:
    """Raise KeyboardInterrupt where the worker is to leave at once. On the main thread, whose `frame` was interrupted.

    It is raised once, so that files and memory are given back on the way out, and not at all where an error is on its
    way out already. Inside of a PyTorch operation that Python takes part in it is not raised either: PyTorch's fake
    tensors leave their state half changed then, and the process aborts; nor where an object is let go of, where nobody
    would hear of it. Who asks, asks again.
    """
    global _ending, _interrupted, _interruptible
    if must_interrupt() and sys.exc_info()[1] is None and not _called_by_others(frame):
        _ending = _interruptible = False
        _interrupted = True
        raise KeyboardInterrupt


def _called_by_others(frame: FrameType | None) -> bool:
    """Whether the code that runs was called by what takes no exception of ours."""
    while frame is not None:
        name = frame.f_code.co_name
        if name in _CALLED_BY_OTHERS or (name == "apply" and frame.f_code.co_filename.endswith(_AUTOGRAD)):
            return True
        frame = frame.f_back
    return False


def disarm() -> None:
    """From now on nothing is interrupted: the worker has done what it was started for, and leaves."""
    global _ending, _interruptible
    _ending = _interruptible = False
    _disarmed.set()


def interrupted() -> bool:
    """Whether `interrupt` has raised in this run: what fails from there on follows from it."""
    return _interrupted


@contextlib.contextmanager
def listening(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """While inside, the first of `signals` sets the flag, and a second one raises KeyboardInterrupt; `SAVE` asks for a
    checkpoint. For a process of the user's own; workers have a control thread (`launch.control`).
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
    """Install signal handlers, and put the previous ones back at the end. Only the main thread can; others
    skip.

    A signal that is ignored (nohup does so with SIGHUP) stays ignored, but for SIGINT, which shells ignore
    for what they start in the background and which the launcher then sends on purpose.
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
