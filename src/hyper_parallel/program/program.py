"""Program: device groups, tasks, ports and the instruction list of each class of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import DeviceGroup, Layout


class TaskKind(StrEnum):
    """What a task computes, once for each micro-batch.

    A micro-batch's backward pass in a stage is one BACKWARD, or an INPUT and later a WEIGHT: a stage may have tasks of
    all three kinds, and take another one for each micro-batch. What runs once a step is no part of a Program.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and of weights together."""
    INPUT = "input"
    """Gradients of inputs alone: the first half of a split backward pass."""
    WEIGHT = "weight"
    """Gradients of weights alone: the second half."""


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
    stage: int | None = None
    """The pipeline stage that the task belongs to. Tasks of one stage share what a micro-batch's forward pass saves."""
    micro_batches: tuple[int, ...] | None = None
    """Those that it runs for: micro-batches of several kinds have tasks of their kind. None: all."""


@dataclass(frozen=True)
class Port:
    """A value that crosses from one task to another.

    The gradient of a value is a port of its own, with a layout of its own: a gradient to which every replica has its
    share is `partial` over the axis of the replicas, one that every replica holds in full is not.
    """

    name: str
    layout: Layout
    """In the group that computes the value."""
    dtype: str
    """As torch names it: ``bfloat16``."""
    group: str
    """The name of the device group that computes the value."""
    received: Mapping[str, Layout] = field(default_factory=dict, hash=False)
    """By receiving group: the layout in which it takes the value. A group that is left out has an equal mesh and takes
    the value in `layout`."""

    def layout_in(self, group: str) -> Layout:
        """The value's layout in a group that computes or receives it."""
        return self.layout if group == self.group else self.received.get(group, self.layout)


# Instructions of one class of ranks, in the order in which a rank issues them.
#
# Which instructions block, and on what:
#
# - `Run` never waits for another group. Every value that its task takes must be in memory by then.
# - `RunPair` runs two tasks as one, their operators in turns. It takes what both take, and gives what both give; the
# rest
#   is as for `Run`.
# - `Recv` posts a receive and returns. Its value is in memory after the `Wait` of the same transfer, which has to come
#   before the first `Run` that takes it.
# - `Send` starts a transfer. Under *rendezvous* it returns when the other group has posted the matching `Recv` (gloo
#   and large messages of every library); under *asynchronous* sends it returns at once. A Program has to be right under
#   both, so nothing may rely on a `Send` that returns early, nor on one that holds its group up.
# - `Wait` blocks until its transfer is over: for a receive until the other group has issued the `Send`; for a send
#   until the other group has posted the `Recv`, after which the buffer is free. A send without a `Wait` holds its
#   buffer until the step ends.
#
# A channel is an ordered pair of groups. It is first in, first out: the k-th `Send` from A to B meets the k-th `Recv`
# of B from A, since NCCL and HCCL have no tags. Each channel has a communicator of its own, so the two directions
# between a pair do not hold each other up.


def _of(name: str, micro_batch: int) -> str:
    return f"{name}, micro-batch {micro_batch}"


@dataclass(frozen=True)
class Run:
    """Run a task."""

    task: str
    micro_batch: int

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
    """Send this rank's part of a port's value to another group."""

    port: str
    micro_batch: int
    to: str

    def __str__(self) -> str:
        return f"Send({_of(self.port, self.micro_batch)}) to {self.to}"


@dataclass(frozen=True)
class Recv:
    """Post the receive of a port's value from another group; the value is in memory after its `Wait`."""

    port: str
    micro_batch: int
    source: str

    def __str__(self) -> str:
        return f"Recv({_of(self.port, self.micro_batch)}) from {self.source}"


@dataclass(frozen=True)
class Wait:
    """Wait until a posted receive has its value, or until a send has let go of its buffer.

    It is a send's Wait in the group that computes the port's value, and a receive's in every other.
    """

    port: str
    micro_batch: int
    peer: str
    """The group at the other end of the transfer."""

    def __str__(self) -> str:
        return f"Wait({_of(self.port, self.micro_batch)}) for {self.peer}"


Instruction = Run | RunPair | Send | Recv | Wait


def runs_of(instruction: Instruction) -> tuple[Run, ...]:
    """The tasks that an instruction runs, none for one that runs nothing."""
    if isinstance(instruction, RunPair):
        return instruction.forward, instruction.backward
    return (instruction,) if isinstance(instruction, Run) else ()


Value = tuple[str, int]
"""A port's value of one micro-batch."""


@dataclass(frozen=True)
class Program:
    """What runs. Every rank of a device group issues the instructions of its group.

    A rank may be in several groups, for what is read off the layouts, but only one of them may have instructions.
    """

    groups: Mapping[str, DeviceGroup]
    tasks: Mapping[str, Task]
    ports: Mapping[str, Port]
    instructions: Mapping[str, tuple[Instruction, ...]]
    """By the name of the device group."""
    micro_batches: int

    def __post_init__(self) -> None:
        for kind, named in (("group", self.groups), ("task", self.tasks), ("port", self.ports)):
            for name, one in named.items():
                if one.name != name:
                    raise StrategyError(f"the program's {kind} {name!r} calls itself {one.name!r}")
        for task in self.tasks.values():
            self._known(task.group, self.groups, f"task {task.name!r} runs on group")
            for port in (*task.takes, *task.gives):
                self._known(port, self.ports, f"task {task.name!r} names port")
        for group in self.instructions:
            self._known(group, self.groups, "instructions are given for group")

    @staticmethod
    def _known(name: str, known: Mapping[str, object], what: str) -> None:
        if name not in known:
            raise StrategyError(
                f"{what} {name!r}, which the program does not have: it has {', '.join(known)}"
            )

    def micro_batches_of(self, task: Task) -> Sequence[int]:
        """The micro-batches that a task runs for."""
        return range(self.micro_batches) if task.micro_batches is None else task.micro_batches
