"""Replans offloading during a run when links are slower or faster than planned.

Each rank looks at its own links (`bandwidth_monitor`). Where one departs, and the step would wait for
it, the rank says so with what the ranks tell each other in every step, and all plan anew before the same step, each by
its own links. No collective is added, and no bit of the results depends on it.

A run on a machine that is busy with other things must not plan for ever: nothing is asked for within QUIET steps of the
last time, for twice as long after each time that changed nothing, and a plan stays unless a new one promises GAIN.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from hyper_parallel.offloading import OffloadTier, replay
from hyper_parallel.offloading.schedule.offload_pass import Planned
from hyper_parallel.step.graph_cache import Captured, Graphs
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.units import format_duration

log = logging.getLogger(__name__)

QUIET = 50
"""Steps."""
GAIN = 0.03
"""Of a step's time: as much as is worth a plan, and as a step must wait for links before one is asked for."""


class Replanning:
    """Of one rank of a run."""

    def __init__(self, graphs: Graphs, budget: Budget) -> None:
        self._graphs, self._budget = graphs, budget
        self._rest, self._pause = 0, QUIET
        self._why = ""
        """For which new plans this rank asked."""

    def wanted(self) -> bool:
        """Whether this rank asks for new plans."""
        if self._rest > 0 or not self._budget.watch.departed:
            return False
        measured = self._budget.watch.measured()
        if any(_waits(found, measured) for found in self._budget.found.values()):
            self._why = ", ".join(self._budget.watch.told())
            return True
        # Slower or faster than thought, and nothing waits for it.
        self._rest = self._pause
        return False

    def due(self, asked: bool) -> bool:
        """A step is over: whether all plan anew now, `asked` for by some rank in it."""
        self._budget.watch.ended()
        self._rest = max(0, self._rest - 1)
        return asked

    def plan_anew(self) -> None:
        """Plan each step by the links as they were measured; what would hardly be quicker stays as it is."""
        begun, watch = time.perf_counter(), self._budget.watch
        # By now the links may be as they were when this rank asked, or nearly.
        why = (
            ", ".join(watch.told())
            or self._why
            or "those of another worker are not what its plan takes them to be"
        )
        self._why = ""
        self._budget.plan_by(watch.measured())
        changes = [change for graph in self._graphs.captured if (change := self._replaced(graph)) is not None]
        self._pause = QUIET if changes else 2 * self._pause
        self._rest = self._pause
        come = " and ".join(changes) or f"no plan is quicker by {GAIN:.0%}, so that nothing changes"
        self._graphs.note(f"links: {why}; planned anew in {time.perf_counter() - begun:.1f} s: {come}")

    def _replaced(self, graph: Captured) -> str | None:
        """What a new plan of a step promises, where it is in use from now on."""
        assert graph.runtime is not None
        before = self._budget.found[graph.runtime]
        new = self._graphs.planned_anew(graph, graph.load or 1.0)
        if isinstance(new, str):
            log.info("the plan stays, since no other was found: %s", new)
            return None
        assert new.runtime is not None
        after = self._budget.found[new.runtime]
        old = replay(replace(before.problem, spaces=after.problem.spaces), before.plan.moves).seconds
        if after.plan.seconds > (1 - GAIN) * old:
            self._graphs.drop(new)
            return None
        self._graphs.replace(graph, new)
        return f"predicted {format_duration(after.plan.seconds)} a step instead of {format_duration(old)}"


def _waits(found: Planned, spaces: tuple[OffloadTier, ...]) -> bool:
    """Whether a step would wait for links like these for longer than a plan is worth."""
    told = replay(replace(found.problem, spaces=spaces), found.plan.moves)
    return told.stall > GAIN * told.seconds
