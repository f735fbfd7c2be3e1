"""Program: device groups, tasks, ports and the instruction list of each class of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program.instructions import Instruction
from hyper_parallel.program.port import Port
from hyper_parallel.program.task import Task

Value = tuple[str, int | None]
"""A port's value of one micro-batch, or of the whole step (None)."""


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

    def step_ports(self) -> frozenset[str]:
        """Ports whose value exists once a step, since a task that runs once a step gives it."""
        return frozenset(
            port for task in self.tasks.values() if not task.per_micro_batch for port in task.gives
        )

    def micro_batches_of(self, task: Task) -> Sequence[int]:
        """The micro-batches that a task runs for."""
        return range(self.micro_batches) if task.micro_batches is None else task.micro_batches

    def values(self, port: str, micro_batch: int | None, step_ports: frozenset[str]) -> tuple[Value, ...]:
        """The values of a port that a task takes when it runs for `micro_batch`.

        A task that runs once a step takes the values of all micro-batches. `step_ports`: as of the method.
        """
        if port in step_ports:
            return ((port, None),)
        if micro_batch is not None:
            return ((port, micro_batch),)
        given = {
            each for task in self.tasks.values() if port in task.gives for each in self.micro_batches_of(task)
        }
        return tuple((port, each) for each in sorted(given))
