"""Trace: the ops of each rank in a step. Timeline: when each op ran.

No torch: a Trace is plain data, lowered from a graph or read from a file.
"""

from hyper_parallel.trace.bubbles import Bubbles
from hyper_parallel.trace.memory_timeline import Alive, MemoryCurve, Peak
from hyper_parallel.trace.serialize import dump_timeline, dump_trace, load_timeline, load_trace
from hyper_parallel.trace.timeline import Alone, Masked, Sum, Timeline
from hyper_parallel.trace.trace import (
    KINDS,
    Bytes,
    Collective,
    Kind,
    Op,
    Span,
    Trace,
    copy_tiers,
    is_comm,
    is_compute,
    pattern,
)

__all__ = [
    "KINDS",
    "Alive",
    "Alone",
    "Bubbles",
    "Bytes",
    "Collective",
    "Kind",
    "Masked",
    "MemoryCurve",
    "Op",
    "Peak",
    "Span",
    "Sum",
    "Timeline",
    "Trace",
    "copy_tiers",
    "dump_timeline",
    "dump_trace",
    "is_comm",
    "is_compute",
    "load_timeline",
    "load_trace",
    "pattern",
]
