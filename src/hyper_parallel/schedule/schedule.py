"""A pipeline schedule: on which rank each stage lies, and in which order each rank runs its actions."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.program.program import TaskKind


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
    pairs: tuple[tuple[int, ...], ...] = ()
    """By rank: places in its order whose action runs together with the next one, a forward pass with the backward pass
    (or its INPUT half) of another micro-batch. None when left out."""

    def pairs_of(self, rank: int) -> frozenset[int]:
        """The places of a rank's pairs."""
        return frozenset(self.pairs[rank]) if self.pairs else frozenset()

    def units(self, rank: int) -> list[tuple[Action, ...]]:
        """A rank's order with what runs together in one place: an action, or a pair."""
        order, pairs = self.orders[rank], self.pairs_of(rank)
        return [order[at : at + 1 + (at in pairs)] for at in range(len(order)) if at - 1 not in pairs]

    @property
    def stages(self) -> int:
        """Number of stages of all ranks together."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)
