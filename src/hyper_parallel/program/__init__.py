"""Program: what runs on which device group in which order. Plain data, no torch.

A Program has device groups, tasks (each a StepGraph of one group), ports (values that cross between tasks), and for
each class of ranks a list of instructions. Pipelines are Programs of several groups; plain training is one group.
"""

from hyper_parallel.program.device_group import DeviceGroup
from hyper_parallel.program.instructions import Instruction, Recv, Reduce, Run, Send, Wait
from hyper_parallel.program.program import Program
from hyper_parallel.program.task import Port, Task, TaskKind

__all__ = [
    "DeviceGroup",
    "Instruction",
    "Port",
    "Program",
    "Recv",
    "Reduce",
    "Run",
    "Send",
    "Task",
    "TaskKind",
    "Wait",
]
