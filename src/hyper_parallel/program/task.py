"""Task: a part of a step that one device group runs as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
"""Tasks that run once for each micro-batch; the others run once a step.

A micro-batch's backward pass in a stage is one BACKWARD, or an INPUT and later a WEIGHT: a stage may have tasks of all
three kinds, and take another one for each micro-batch.
"""


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
    stage: int | None = None
    """The pipeline stage that the task belongs to. Tasks of one stage share what a micro-batch's forward pass saves."""
    micro_batches: tuple[int, ...] | None = None
    """Those that it runs for: micro-batches of several kinds have tasks of their kind. None: all."""

    @property
    def per_micro_batch(self) -> bool:
        """Whether it runs once for each micro-batch, and not once a step."""
        return self.kind in PER_MICRO_BATCH
