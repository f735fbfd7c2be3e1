"""A pipeline schedule: on which rank each stage lies, and in which order each rank runs its actions."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.program import TaskKind


@dataclass(frozen=True, slots=True)
class Action:
    """One task of one stage on one micro-batch."""

    kind: TaskKind
    """FORWARD, BACKWARD, or its halves INPUT and WEIGHT."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """``F3.1``: the forward pass of micro-batch 1 in stage 3; B, I and W are the backward pass and its halves."""
        return f"{self.kind.value[0].upper()}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Orders of actions. A rank of the schedule is a device group of the run: all its ranks do the same."""

    name: str
    placement: tuple[int, ...]
    """Stage to the rank that it lies on."""
    orders: tuple[tuple[Action, ...], ...]
    """By rank."""
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of stages of all ranks together."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)
