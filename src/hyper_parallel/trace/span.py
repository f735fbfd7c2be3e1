"""The span of one op in a Timeline."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.trace.op import Op


@dataclass(frozen=True, slots=True)
class Span:
    """When an op ran, and where. Times are seconds since the step began."""

    rank: int
    """The lowest rank of its class."""
    engine: str
    """`matrix`, `vector`, or the name of the queue."""
    start: float
    end: float
    op: Op
    ready: float
    """When its predecessors in its queue and its dependencies on its own rank had ended. From then until `start` a
    collective waits for other ranks, and a kernel for its engine.
    """
