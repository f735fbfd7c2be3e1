"""Progress of planning: what is under way, and about how many seconds are left."""

from __future__ import annotations

import time
from collections.abc import Callable

from hyper_parallel.units import format_duration

QUIET_S = 3.0
"""Seconds of planning before anything is shown, and between two lines."""


class PlanningProgress:
    """Counts the nodes that planning has looked at, and estimates from the seconds so far how many are left.

    Nothing of a plan depends on it, so that ranks with other clocks have the same plans.
    """

    def __init__(self, show: Callable[[str], None] | None) -> None:
        """`show`: is given a line at a time; None shows nothing."""
        self._show = show
        self._begun = self._shown = time.monotonic()
        self._done = 0

    def advance(self, nodes: int, left: int, what: str) -> None:
        """Say that work on `nodes` is done, that on `left` others is to do at most, and `what` is next."""
        self._done += nodes
        now = time.monotonic()
        if self._show is None or now - self._shown < QUIET_S or not self._done:
            return
        self._shown = now
        seconds = (now - self._begun) * left / self._done
        self._show(f"planning memory: {what}, at most about {format_duration(max(seconds, 1.0))} left")
