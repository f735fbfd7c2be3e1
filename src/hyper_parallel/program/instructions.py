"""Instructions of one class of ranks, in the order in which a rank issues them.

Which instructions block, and on what:

- `Run` never waits for another group. Every value that its task takes must be in memory by then.
- `RunPair` runs two tasks as one, their operators in turns. It takes what both take, and gives what both give; the rest
  is as for `Run`.
- `Recv` posts a receive and returns. Its value is in memory after the `Wait` of the same transfer, which has to come
  before the first `Run` that takes it.
- `Send` starts a transfer. Under *rendezvous* it returns when the other group has posted the matching `Recv` (gloo
  and large messages of every library); under *asynchronous* sends it returns at once. A Program has to be right under
  both, so nothing may rely on a `Send` that returns early, nor on one that holds its group up.
- `Wait` blocks until its transfer is over: for a receive until the other group has issued the `Send`; for a send
  until the other group has posted the `Recv`, after which the buffer is free. A send without a `Wait` holds its
  buffer until the step ends.
- `Reduce` blocks until every group of `over` has reached the same `Reduce`.

A channel is an ordered pair of groups. It is first in, first out: the k-th `Send` from A to B meets the k-th `Recv`
of B from A, since NCCL and HCCL have no tags. Each channel has a communicator of its own, so the two directions
between a pair do not hold each other up.
"""

from __future__ import annotations

from dataclasses import dataclass


def _of(port: str, micro_batch: int | None) -> str:
    return port if micro_batch is None else f"{port}, micro-batch {micro_batch}"


@dataclass(frozen=True)
class Run:
    """Run a task. `micro_batch` is None for a task that runs once a step."""

    task: str
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"Run({_of(self.task, self.micro_batch)})"


@dataclass(frozen=True)
class RunPair:
    """Run the forward task of a micro-batch together with the backward (or input) task of another one: one computes
    while the other waits for a collective of the group's own mesh."""

    forward: Run
    backward: Run

    def __str__(self) -> str:
        both = (_of(one.task, one.micro_batch) for one in (self.forward, self.backward))
        return f"RunPair({'; '.join(both)})"


@dataclass(frozen=True)
class Send:
    """Send this rank's part of a port's value to another group. `micro_batch` is None for a value of the whole step."""

    port: str
    micro_batch: int | None
    to: str

    def __str__(self) -> str:
        return f"Send({_of(self.port, self.micro_batch)}) to {self.to}"


@dataclass(frozen=True)
class Recv:
    """Post the receive of a port's value from another group; the value is in memory after its `Wait`."""

    port: str
    micro_batch: int | None
    source: str

    def __str__(self) -> str:
        return f"Recv({_of(self.port, self.micro_batch)}) from {self.source}"


@dataclass(frozen=True)
class Wait:
    """Wait until a posted receive has its value, or until a send has let go of its buffer.

    It is a send's Wait in the group that computes the port's value, and a receive's in every other.
    """

    port: str
    micro_batch: int | None
    peer: str
    """The group at the other end of the transfer."""

    def __str__(self) -> str:
        return f"Wait({_of(self.port, self.micro_batch)}) for {self.peer}"


@dataclass(frozen=True)
class Reduce:
    """Sum a port's value over device groups: gradients of weights that several stages share.

    A task of each group gives the port; rank i of a group adds its part to rank i's of the others. The k-th `Reduce`
    over the same groups is the same one in each.
    """

    port: str
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"Reduce({self.port}) over {', '.join(self.over)}"


Instruction = Run | RunPair | Send | Recv | Wait | Reduce


def runs_of(instruction: Instruction) -> tuple[Run, ...]:
    """The tasks that an instruction runs, none for one that runs nothing."""
    if isinstance(instruction, RunPair):
        return instruction.forward, instruction.backward
    return (instruction,) if isinstance(instruction, Run) else ()
