"""Defect: what is wrong with a Program, by kind, with a message that names the instructions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class DefectKind(StrEnum):
    """What a defect is about."""

    DECLARATION = "declaration"
    """Groups, tasks, ports and layouts contradict each other, or an instruction names what does not exist."""
    RUNS = "runs"
    """A task runs twice, never, or at the wrong place in the step."""
    VALUE = "value"
    """A value is used before it is in memory."""
    CHANNEL = "channel"
    """Sends and receives, or the Reduces of several groups, do not meet one to one and in one order."""
    DEADLOCK = "deadlock"
    """Groups wait for each other in a cycle."""
    MEMORY = "memory"
    """A group holds more bytes than its cap."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong."""

    kind: DefectKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def at(group: str, index: int, instruction: object) -> str:
    """How messages name an instruction: ``stage 0's instruction 7, Send(...) to stage 1``."""
    return f"{group}'s instruction {index}, {instruction},"


def shown(values: Iterable[object], most: int = 6) -> str:
    """A list for a message: the first few, and how many more."""
    texts = [str(value) for value in values]
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest
