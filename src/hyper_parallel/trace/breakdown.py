"""Time breakdown of a step by phase, module and kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from hyper_parallel.trace.op import copy_tiers, is_comm, is_compute
from hyper_parallel.trace.span import Span


@dataclass
class Sum:
    """Times of one row, as means over all ranks. Queues run in parallel, so that seconds of different queues may
    overlap.
    """

    compute: float = 0.0
    """Seconds of kernels."""
    communication: float = 0.0
    """Seconds of collectives, without their wait for other ranks."""
    copies: float = 0.0
    """Seconds of copies between tiers."""
    host: float = 0.0
    """Seconds of host work."""
    count: float = 0.0
    """Number of ops."""
    flops: float = 0.0
    """FLOPs of kernels, matrix and vector."""

    @property
    def total(self) -> float:
        """All seconds."""
        return self.compute + self.communication + self.copies + self.host

    def __iadd__(self, other: Sum) -> Sum:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def sums(spans: Iterable[tuple[Span, float]], key: Callable[[Span], str]) -> dict[str, Sum]:
    """The sums of spans by a key, in order of appearance; each span counts with its weight."""
    found: dict[str, Sum] = {}
    for span, weight in spans:
        op = span.op
        into = found.setdefault(key(span), Sum())
        seconds = (span.end - span.start) * weight
        if is_compute(op.queue):
            into.compute += seconds
        elif is_comm(op.queue):
            into.communication += seconds
        elif copy_tiers(op.queue):
            into.copies += seconds
        else:
            into.host += seconds
        into.count += weight
        if op.work:
            into.flops += (op.work.flops + op.work.vector_flops) * weight
    return found
