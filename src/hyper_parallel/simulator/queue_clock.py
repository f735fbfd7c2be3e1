"""Queue clock: when one program's transfers end, on queues that are first in, first out and share nothing.

A program (the host, or the list that a device is given) does one thing after the other. On the way it begins transfers
and collectives on queues, which run beside it, and waits for some of them:

    end = max(now, end of the one before it on its queue, what it needs) + seconds                   `QueueClock.begin`
    now = max(now, end of what is waited for)                                                        `QueueClock.wait`
    now = now + seconds, `slowdown` times as long where a queue is busy as it starts                  `QueueClock.run`

This is `simulator.engine` for a trace of one rank class in which no two transfers share a link, and kernels take as
long beside collectives as alone: there both give the same times. It costs a few additions for each transfer instead of
events, so that schedulers can ask it thousands of times. All that say when a transfer ends ask it: `replay` of an
offload plan and its incremental form (`Draft.stall`), the search for leaves (`edf_schedule`), the placement's links,
and list scheduling. Links that are fluids (`greedy_selection`, `lp_relaxation`) and latest starts (`placement`) are
relaxations: they say what no schedule can beat, or what to begin with, and not when something ends.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Q = TypeVar("Q", bound=Hashable)

_EVER = -math.inf


class QueueClock(Generic[Q]):
    """The time of one program, and when each of its queues is free."""

    __slots__ = ("free", "now", "slowdown")

    def __init__(self, slowdown: float = 1.0) -> None:
        self.now = 0.0
        """Seconds: what the program does next, it does then."""
        self.free: dict[Q, float] = {}
        """When what was begun on each queue has ended; a queue on which nothing was begun is free."""
        self.slowdown = slowdown
        """How many times as long a kernel takes beside a transfer."""

    def end(self, queue: Q, seconds: float, after: float = _EVER) -> float:
        """When a transfer that needs what ends `after` would end, if it were begun now."""
        # Comparisons, since `max` takes three times as long, and solvers come here millions of times.
        start = self.free.get(queue, _EVER)
        if start < self.now:
            start = self.now
        if start < after:
            start = after
        return start + seconds

    def begin(self, queue: Q, seconds: float, after: float = _EVER) -> float:
        """Begin a transfer that needs what ends `after`; when it ends."""
        start = self.free.get(queue, _EVER)
        if start < self.now:
            start = self.now
        if start < after:
            start = after
        self.free[queue] = end = start + seconds
        return end

    def wait(self, end: float) -> float:
        """Wait for what ends then; for how many seconds."""
        late = end - self.now
        if late <= 0:
            return 0.0
        self.now = end
        return late

    def run(self, seconds: float) -> None:
        """Run a kernel."""
        if self.slowdown != 1.0 and self.free and max(self.free.values()) > self.now:
            seconds *= self.slowdown
        self.now += seconds

    def shift(self, seconds: float) -> None:
        """Move the origin of time `seconds` later, for the next of several steps."""
        self.now -= seconds
        for queue in self.free:
            self.free[queue] -= seconds
