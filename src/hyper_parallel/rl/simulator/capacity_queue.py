"""Admission by capacity alone, as a baseline: it limits how many groups start, and not how stale they get.

Published systems admit (η + version + 1) B - accepted - running groups and train them as they finish. With everything
else as in `StalenessQueue`, that is its `discard` order without dropping anything.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.rl.queue import StalenessQueue


class CapacityQueue(StalenessQueue[Any]):
    """A queue whose items exceed its bound. For comparison; training uses `StalenessQueue`."""

    def __init__(self, *, batch: int, updates: int = 1, staleness: int = 0) -> None:
        """As of `StalenessQueue`."""
        super().__init__(batch=batch, updates=updates, staleness=staleness, order="discard")

    def _check(self, staleness: int) -> None:
        """Any staleness is taken."""

    def _expired(self, version: int) -> bool:
        return False

    def _choose(self) -> list[int] | None:
        return list(self._finished)[: self.batch] if self.ready() else None
