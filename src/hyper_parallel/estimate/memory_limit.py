"""A limit on a step's memory, checked before its collectives are ordered, which takes most of a prediction's time."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.graph import Pass, StepGraph
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.liveness import peak


class AboveLimit(Exception):
    """A step that holds more than it may."""

    def __init__(self, peak: int, limit: float) -> None:
        super().__init__(f"the step holds {peak} bytes at once, and may hold {limit:.0f}")
        self.peak = peak
        """Bytes."""


@dataclass(frozen=True)
class WithinMemory:
    """A pass that orders collectives, for steps whose peak before it is at most `bytes`."""

    orders: Pass
    bytes: float

    @property
    def name(self) -> str:
        """Of the pass."""
        return self.orders.name

    @property
    def requires(self) -> frozenset[str]:
        """Of the pass."""
        return self.orders.requires

    @property
    def provides(self) -> frozenset[str]:
        """Of the pass."""
        return self.orders.provides

    @property
    def conflicts(self) -> frozenset[str]:
        """Of the pass."""
        return self.orders.conflicts

    def __call__(self, step: StepGraph) -> StepGraph:
        """The ordered step. Raises AboveLimit."""
        found = peak(step, balanced_sizes(step)).bytes
        if found > self.bytes:
            raise AboveLimit(found, self.bytes)
        return self.orders(step)
