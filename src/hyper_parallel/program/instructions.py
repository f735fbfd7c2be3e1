"""Instructions of one class of ranks, in the order in which a rank issues them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Run a task. `micro_batch` is None for a task that runs once a step."""

    task: str
    micro_batch: int | None = None


@dataclass(frozen=True)
class Send:
    """Send this rank's part of a port's value to another group."""

    port: str
    micro_batch: int
    to: str


@dataclass(frozen=True)
class Recv:
    """Post the receive of a port's value from another group; the value is there after a `Wait` or at its first use."""

    port: str
    micro_batch: int
    source: str


@dataclass(frozen=True)
class Wait:
    """Wait until a posted receive has its value, or a send has let go of its buffer."""

    port: str
    micro_batch: int


@dataclass(frozen=True)
class Reduce:
    """Sum a port's value over device groups: gradients of weights that several stages share."""

    port: str
    over: tuple[str, ...]


Instruction = Run | Send | Recv | Wait | Reduce
