"""Shared memory in which workers write the instruction that they run, for the command to read when one has died.

A heartbeat is up to half a second old, and a killed process sends none. What it wrote to memory that the command also
maps survives. Each worker has one slot: the step and the text of the instruction.
"""

from __future__ import annotations

import mmap
import os
import tempfile

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
        """The command has read what it wanted."""
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
