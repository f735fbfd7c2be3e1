"""Groups of long-lived workers that a controller drives by lists of instructions: local processes, or Ray actors."""

from hyper_parallel.launch.roles.engine import Engine, Group
from hyper_parallel.launch.roles.local import LocalEngine
from hyper_parallel.launch.roles.protocol import Future, Instruction, wait_any

__all__ = ["Engine", "Future", "Group", "Instruction", "LocalEngine", "wait_any"]
