"""Time breakdown of a step by phase, module and kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from hyper_parallel.trace.op import copy_tiers, is_comm, is_compute
from hyper_parallel.trace.span import Span


@dataclass
class Sum:
    """What ran under one name, on a rank: the mean of all ranks. Queues run beside each other, so that seconds of
    different ones may be the same moments."""

    compute: float = 0.0
    """Seconds of kernels."""
    communication: float = 0.0
    """Seconds in which collectives ran, without the time in which they waited for other ranks."""
    copies: float = 0.0
    """Seconds of copies between tiers."""
    host: float = 0.0
    """Seconds of the host."""
    count: float = 0.0
    """Ops."""
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
    """The sums of spans by a key, in the order in which keys come; each span counts with its weight."""
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
