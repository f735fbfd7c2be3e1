"""Groups of long-lived workers that a controller drives by lists of instructions: local processes, or Ray actors."""

from hyper_parallel.launch.roles.local import LocalEngine
from hyper_parallel.launch.roles.protocol import Engine, Future, Group, Instruction, wait_any

__all__ = ["Engine", "Future", "Group", "Instruction", "LocalEngine", "wait_any"]
