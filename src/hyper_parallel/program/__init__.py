"""Program: what each rank runs in a step, in order. Timeline: what ran when, and what that says.

No torch here: a Program is plain data, whether a graph was lowered to it or a file holds it.
"""

from hyper_parallel.program.bubbles import Bubbles
from hyper_parallel.program.memory import Alive, Curve, Peak
from hyper_parallel.program.op import (
    KINDS,
    Bytes,
    Collective,
    Kind,
    Op,
    copy_tiers,
    is_comm,
    is_compute,
    pattern,
)
from hyper_parallel.program.program import Program
from hyper_parallel.program.serial import dump_program, dump_timeline, load_program, load_timeline
from hyper_parallel.program.span import Span
from hyper_parallel.program.sums import Sum
from hyper_parallel.program.timeline import Alone, Masked, Timeline

__all__ = [
    "KINDS",
    "Alive",
    "Alone",
    "Bubbles",
    "Bytes",
    "Collective",
    "Curve",
    "Kind",
    "Masked",
    "Op",
    "Peak",
    "Program",
    "Span",
    "Sum",
    "Timeline",
    "copy_tiers",
    "dump_program",
    "dump_timeline",
    "is_comm",
    "is_compute",
    "load_program",
    "load_timeline",
    "pattern",
]
