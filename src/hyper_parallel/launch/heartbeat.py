"""A rank's heartbeat: its step, its operation and its progress.

The control thread sends two per second, whatever the main thread does. A stopped process sends none; one that hangs
keeps sending the same. `launch.watchdog` determines from the heartbeats of all ranks which one stopped first.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

BEAT_S = 0.5
"""Seconds between heartbeats."""
_DEPTH = 12
"""Number of stack frames that are searched for a collective."""
_STEPS = 51
"""Number of steps whose median is the step time."""


@dataclass(frozen=True)
class Beat:
    """The content of a heartbeat."""

    step: int = 0
    """The step that the rank is in, from 1; 0 before the first."""
    operation: str = "starting"
    patient: bool = True
    """Whether the operation has no normal duration: a compilation, a save, an evaluation."""
    progress: int = 0
    """Grows with each step, operation and collective that the rank begins."""
    collectives: int = 0
    """The number of collectives begun: the rank that others wait for has begun fewer."""
    cpu: float = 0.0
    """Seconds of processor time of its process."""
    step_time: float | None = None
    """The median, in seconds, of its last steps."""
    where: str = ""
    """The main thread's source line; empty while it makes progress."""
    waits: bool = False
    """Whether that line is in a collective."""


class Pulse:
    """Tracks the position of this process's main thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A run begins."""
        self._step = 0
        self._operations: list[tuple[str, bool]] = [("starting", True)]
        self._marks = 0
        self._times: deque[float] = deque(maxlen=_STEPS)
        self._beside = 0.0
        self._last = -1
        self._count: Callable[[], int] = lambda: 0

    def count_collectives(self, count: Callable[[], int]) -> None:
        """From now on `count` returns the number of collectives begun; it is called on the control thread."""
        self._count = count

    @contextlib.contextmanager
    def operation(self, name: str, *, patient: bool = True) -> Iterator[None]:
        """Inside this context the rank runs this operation; `patient` ones do not count as step time and have their own
        limit.
        """
        begun = time.monotonic()
        self._operations.append((name, patient))
        self._marks += 1
        try:
            yield
        finally:
            self._operations.pop()
            self._marks += 1
            if patient:
                self._beside += time.monotonic() - begun

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """While inside, the rank computes this step, counted from 1."""
        self._step = number
        begun, self._beside = time.monotonic(), 0.0
        with self.operation("step", patient=False):
            yield
        self._times.append(time.monotonic() - begun - self._beside)

    def beat(self) -> Beat:
        """The heartbeat now. Called on the control thread."""
        name, patient = self._operations[-1]
        collectives = self._count()
        progress = self._marks + collectives
        where, waits = _line_of_main() if progress == self._last else ("", False)
        self._last = progress
        times = list(self._times)
        return Beat(
            self._step,
            name,
            patient,
            progress,
            collectives,
            time.process_time(),
            statistics.median(times) if times else None,
            where,
            waits,
        )


pulse = Pulse()
"""This process's position."""


def _line_of_main() -> tuple[str, bool]:
    """The innermost line of the main thread, and whether it is in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    path = Path(frame.f_code.co_filename)
    name = frame.f_code.co_name
    if path.name == "_ops.py":  # where PyTorch calls an operator
        with contextlib.suppress(Exception):
            name = str(frame.f_locals.get("self", name))
    return f"{name} at {path.parent.name}/{path.name}:{frame.f_lineno}", _in_collective(frame, name)


def _in_collective(frame: FrameType | None, name: str) -> bool:
    if "c10d" in name:
        return True
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if "torch/distributed/distributed_c10d" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
