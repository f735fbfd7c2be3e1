"""Groups of long-lived workers that a controller drives by lists of instructions: local processes, or Ray actors."""

from hyper_parallel.launch.roles.interface import Engine, Future, Group, Instruction, wait_any
from hyper_parallel.launch.roles.local import LocalEngine

__all__ = ["Engine", "Future", "Group", "Instruction", "LocalEngine", "wait_any"]
