"""Tasks of a Program, and the ports between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hyper_parallel.layout import Layout


class TaskKind(StrEnum):
    """What a task computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and of weights together."""
    INPUT = "input"
    """Gradients of inputs alone: the first half of a split backward pass."""
    WEIGHT = "weight"
    """Gradients of weights alone: the second half."""
    GATHER = "gather"
    """Parameters brought together before the first micro-batch."""
    REDUCE = "reduce"
    """Gradients summed over ranks and groups after the last micro-batch."""
    UPDATE = "update"
    """Clipping and the optimizer's step."""
    PREFILL = "prefill"
    DECODE = "decode"


PER_MICRO_BATCH = frozenset({TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT})
"""Tasks that run once for each micro-batch; the others run once a step."""


@dataclass(frozen=True)
class Port:
    """A value that crosses from one task to another, in the layout of the group that holds it."""

    name: str
    layout: Layout
    dtype: str
    """As torch names it: ``bfloat16``."""
    group: str
    """The name of the device group that computes the value."""


@dataclass(frozen=True)
class Task:
    """A part of a step that one device group runs as a whole."""

    name: str
    kind: TaskKind
    group: str
    """The name of the device group that runs it."""
    takes: tuple[str, ...] = ()
    """Ports whose values other tasks have computed."""
    gives: tuple[str, ...] = ()
    """Ports whose values it computes."""
    saved: int = 0
    """Bytes on each rank that stay alive from a forward task until the backward tasks of the same micro-batch."""
