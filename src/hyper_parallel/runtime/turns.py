"""Tasks that run alternately: each stops before its waits for collectives, and another one goes on meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Turns = Generator[None, None, dict[str, Value]]
"""A task that stops before each wait for a collective, and gives values by the names of their ports."""


def ended(task: Turns[Value]) -> dict[str, Value]:
    """What a task gives, run without stopping."""
    try:
        while True:
            next(task)
    except StopIteration as stop:
        made: dict[str, Value] = stop.value
        return made


def together(tasks: Sequence[Turns[Value]], order: Iterable[int]) -> list[dict[str, Value]]:
    """What two tasks give that run in turns: `order` has the task whose turn it is, from one of its stops to the next.

    Tasks that have not ended when `order` has are run to their end, one after the other.
    """
    made: dict[int, dict[str, Value]] = {}
    for turn in order:
        if len(made) == len(tasks):
            break
        if turn not in made:
            try:
                next(tasks[turn])
            except StopIteration as stop:
                made[turn] = stop.value
    return [made[at] if at in made else ended(task) for at, task in enumerate(tasks)]
