"""A Timeline: what ran when, on which engine of which rank. A prediction and a measurement are the same type.

step     = the end of the last op − 0                                          `Timeline.step`
MFU      = model FLOPs / (step · ranks · peak)        `workload.mfu`           `Timeline.mfu`
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.program.op import Op
from hyper_parallel.program.program import Program
from hyper_parallel.workload.flops import mfu


@dataclass(frozen=True, slots=True)
class Span:
    """One op that ran. Times are seconds since the step began."""

    rank: int
    """The lowest rank of the class that it stands for."""
    engine: str
    """`matrix`, `vector`, or the name of the queue."""
    start: float
    end: float
    op: Op
    ready: float
    """When its turn in its queue had come and all that it waits for on its own rank had ended. From there to `start`
    a collective waits for other ranks, and a kernel for its engine."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The step's seconds with one sort of op taken out, by which end-to-end masking is defined."""

    compute: float
    """Kernels alone, as if what is sent were there at once."""
    communication: float
    """Collectives alone, as if what is computed were there at once."""


@dataclass(frozen=True)
class Timeline:
    """When each op of a Program ran. Every figure it knows is worked out from the spans and the Program."""

    program: Program
    spans: tuple[Span, ...]
    """Class by class, each in the order of its ops."""
    predicted: bool
    """By simulation, or measured."""
    device: str
    """The name of the device."""
    cluster: str = ""
    """The name of the cluster."""
    source: str = ""
    """Where the cluster's constants come from."""
    peak_flops: float | None = None
    """FLOP/s of one device at its best in the dtype that the step mostly multiplies in."""
    alone: Alone | None = None

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None where the FLOPs or the peak are not known."""
        if not (self.program.model_flops and self.peak_flops and self.step):
            return None
        return mfu(self.program.model_flops, self.step, self.program.world, self.peak_flops)
