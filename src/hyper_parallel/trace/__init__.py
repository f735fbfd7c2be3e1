"""Trace: the ops of each rank in a step. Timeline: when each op ran.

No torch: a Trace is plain data, lowered from a graph or read from a file.
"""

from hyper_parallel.trace.breakdown import Sum
from hyper_parallel.trace.bubbles import Bubbles
from hyper_parallel.trace.memory_timeline import Alive, MemoryCurve, Peak
from hyper_parallel.trace.op import (
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
from hyper_parallel.trace.serialize import dump_timeline, dump_trace, load_timeline, load_trace
from hyper_parallel.trace.span import Span
from hyper_parallel.trace.timeline import Alone, Masked, Timeline
from hyper_parallel.trace.trace import Trace

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
