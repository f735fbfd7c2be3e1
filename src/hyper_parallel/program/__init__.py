"""Program: what runs on which device group in which order. Plain data, no torch.

A Program has device groups, tasks (each a StepGraph of one group), ports (values that cross between tasks), and for
each class of ranks a list of instructions. Pipelines are Programs of several groups; plain training is one group.
`instruction_loop` runs a list, whatever its values are, and `expand` predicts what it does, as a Trace.
"""

from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program.build import Action, Schedule, to_program
from hyper_parallel.program.check_progress import Defect, DefectKind
from hyper_parallel.program.expand import GroupOps, StageOps, TaskOps, expand
from hyper_parallel.program.program import (
    Instruction,
    Port,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    Task,
    TaskKind,
    Wait,
    runs_of,
)
from hyper_parallel.program.reshard import ReshardPlan, plan_reshard
from hyper_parallel.program.verify import find_defects, verify

__all__ = [
    "Action",
    "Defect",
    "DefectKind",
    "DeviceGroup",
    "GroupOps",
    "Instruction",
    "Port",
    "Program",
    "Recv",
    "ReshardPlan",
    "Run",
    "RunPair",
    "Schedule",
    "Send",
    "StageOps",
    "Task",
    "TaskKind",
    "TaskOps",
    "Wait",
    "expand",
    "find_defects",
    "plan_reshard",
    "runs_of",
    "to_program",
    "verify",
]
