"""Program: device groups, tasks, ports and the instruction list of each class of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.device_group import DeviceGroup
from hyper_parallel.program.instructions import Instruction
from hyper_parallel.program.task import Port, Task


@dataclass(frozen=True)
class Program:
    """What runs. Every rank of a device group issues the instructions of its group."""

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
