"""Program: what each rank runs in a step, in order. Timeline: what ran when, and what that says.

No torch here: a Program is plain data, whether a graph was lowered to it or a file holds it.
"""

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
from hyper_parallel.program.timeline import Alone, Span, Timeline

__all__ = [
    "KINDS",
    "Alone",
    "Bytes",
    "Collective",
    "Kind",
    "Op",
    "Program",
    "Span",
    "Timeline",
    "copy_tiers",
    "is_comm",
    "is_compute",
    "pattern",
]
