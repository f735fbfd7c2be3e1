"""Heartbeats of a rank: its step, operation and progress; and its position in shared memory, which survives it.

The control thread sends two per second, whatever the main thread does. A stopped process sends none; one that hangs
keeps sending the same. `launch.watchdog` determines from the heartbeats of all ranks which one stopped first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

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
    """Grows with each step, operation, collective and instruction that the rank begins."""
    collectives: int = 0
    """The number of collectives begun: the rank that others wait for has begun fewer."""
    cpu: float = 0.0
    """Seconds of processor time of its process."""
    step_time: float | None = None
    """The median, in seconds, of its last steps."""
    where: str = ""
    """The main thread's source line; empty while it makes progress."""
    waits: bool = False
    """Whether that line is in a collective, or the instruction waits for another rank."""
    instruction: str = ""
    """The instruction of a schedule that the rank is in, with its stage and micro-batch; empty outside of one."""


class Position(Protocol):
    """A place in a schedule of instructions (`runtime.graph_interpreter`)."""

    @property
    def text(self) -> str:
        """For people."""

    @property
    def waits(self) -> bool:
        """Whether a rank that stands still there waits for another one."""


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
        self._instructions = 0
        self._place = 0
        self._schedule: Sequence[Position] = ()
        self._follower: Callable[[str], None] | None = None
        self._slot: Slot | None = None
        self._texts: list[bytes] = []
        self._known: dict[int, tuple[Sequence[Position], list[bytes]]] = {}
        """Encoded positions of the run's schedules, by the identity of these."""

    def write_to(self, slot: Slot) -> None:
        """From now on the instructions of schedules are also written to this slot of the command's board."""
        self._slot = slot

    @contextlib.contextmanager
    def followed(self, begins: Callable[[str], None]) -> Iterator[None]:
        """Inside this context `begins` is called with the text of each instruction of a schedule that the rank begins,
        and with an empty one where the schedule ends."""
        self._follower = begins
        try:
            yield
        finally:
            self._follower = None
            begins("")

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

    @contextlib.contextmanager
    def schedule(self, positions: Sequence[Position]) -> Iterator[None]:
        """Inside this context the rank runs a schedule of instructions; `instruction` says which."""
        self._place, self._schedule = 0, positions
        if self._slot is not None:
            self._texts = self._encoded(positions)
            self._slot.begin(self._step)
        yield
        # Where the rank fails, the board and the heartbeats keep its position.
        self._schedule = ()
        if self._follower is not None:
            self._follower("")
        if self._slot is not None:
            self._slot.clear()

    def _encoded(self, positions: Sequence[Position]) -> list[bytes]:
        known = self._known.get(id(positions))
        if known is None:
            name, _ = self._operations[-1]
            before = "" if name == "step" else f"{name}, "
            known = positions, [encoded(before + one.text) for one in positions]
            self._known[id(positions)] = known
        return known[1]

    def instruction(self, place: int) -> None:
        """The rank begins this instruction of its schedule."""
        self._place = place
        self._instructions += 1
        if self._slot is not None:
            self._slot.text[:] = self._texts[place]
        if self._follower is not None:
            self._follower(self._schedule[place].text)

    def position(self) -> str:
        """The instruction of the schedule that the rank is in, or failed in; empty outside of one."""
        schedule = self._schedule
        return schedule[min(self._place, len(schedule) - 1)].text if schedule else ""

    def beat(self) -> Beat:
        """The heartbeat now. Called on the control thread."""
        name, patient = self._operations[-1]
        collectives = self._count()
        progress = self._marks + collectives + self._instructions
        schedule = self._schedule
        at = schedule[min(self._place, len(schedule) - 1)] if schedule else None
        if progress != self._last:
            where, waits = "", False
        elif at is not None and at.waits:
            where, waits = "", True
        else:
            where, waits = _line_of_main()
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
            at.text if at is not None else "",
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


# Shared memory in which workers write the instruction that they run, for the command to read when one has died.
#
# A heartbeat is up to half a second old, and a killed process sends none. What it wrote to memory that the command also
# maps survives. Each worker has one slot: the step and the text of the instruction.

_STEP = 8
"""Bytes of the step's number."""
_TEXT = 248
"""Bytes of the text of an instruction; a longer one is cut."""
_SLOT = _STEP + _TEXT
_NONE = bytes(_TEXT)


def encoded(text: str) -> bytes:
    """The text as a slot holds it."""
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0")


class PositionBoard:
    """Slots of the workers of one machine, over the descriptor of the memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))

    @classmethod
    def create(cls, slots: int) -> PositionBoard:
        """New memory, which no file system shows."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("hyper-parallel-positions")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, slots * _SLOT)
        return cls(descriptor)

    def read(self, slot: int) -> tuple[int, str]:
        """The step, and the instruction that its worker is in, or died in; empty outside of a schedule."""
        held = bytes(self._memory[slot * _SLOT : (slot + 1) * _SLOT])
        text = held[_STEP:].rstrip(b"\0").decode(errors="ignore")
        return int.from_bytes(held[:_STEP], "little"), text

    def slot(self, index: int) -> Slot:
        """The slot that a worker writes."""
        return Slot(self._memory[index * _SLOT : (index + 1) * _SLOT])

    def close(self) -> None:
        """Give up the descriptor, once the workers have it: what is mapped can be read and written still."""
        os.close(self.descriptor)


class Slot:
    """One worker's part of the board."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.text = memory, memory[_STEP:]
        """Assign what `encoded` gives to all of `text`."""

    def begin(self, step: int) -> None:
        """A schedule begins in this step, counted from 1."""
        self._memory[:_STEP] = step.to_bytes(_STEP, "little")

    def clear(self) -> None:
        """The schedule has ended."""
        self.text[:] = _NONE
