"""Node order as a pass: list scheduling with a cluster's times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dependencies import reorder
from hyper_parallel.graph.ir import is_collective
from hyper_parallel.graph.pass_manager import SCHEDULE
from hyper_parallel.overlap.jobs import Priced, Prices, jobs_of
from hyper_parallel.overlap.list_scheduling import arrange


@dataclass(frozen=True)
class Schedule:
    """Begins collectives early, waits for them late, and runs beside them whatever does not need them.

    Only the order of the nodes changes, so that results are equal bit for bit.
    """

    prices: Prices
    window: float = math.inf
    """Seconds, of the step as it is, that a micro-batch may run ahead of its first job that is left behind."""
    budget: float = math.inf
    """Bytes that the step may allocate at once, beside what is there from the start."""
    together: int = 1
    """Micro-batches that run side by side; further ones fill their gaps."""
    sizes: Mapping[Any, int] = field(default_factory=dict)

    name: str = "schedule"
    provides: frozenset[str] = frozenset({SCHEDULE})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, step: StepGraph) -> StepGraph:
        """The same nodes in another order."""
        found = jobs_of(Priced.of(step, self.sizes), self.prices)
        free = [node for node in found.nodes if is_collective(node)]
        made = arrange(
            found.jobs,
            window=self.window,
            budget=self.budget,
            together=self.together,
            slowdown=self.prices.slowdown,
        )
        return reorder(step, [found.nodes[index] for index in made.order], free)
