"""Watches what a step's graph holds on the device, without knowing of a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from harness.observer import Observer
from hyper_parallel.graph import Executable
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.offloading.tiers.memory_tier import MemoryTier

PATIENCE_S = 1.0


class _OfDevice(Observer):
    """Does not see what lies in these tiers' own memory, on which the host computes updates.

    gloo's threads let go of a collective's tensors a moment after it is over, and need the interpreter's lock for it.
    Where more than `budget` is alive, they are given that moment before it counts.
    """

    def __init__(self, there: Sequence[torch.Tensor], tiers: set[MemoryTier], budget: float) -> None:
        self._tiers, self._budget, self._waited = tiers, budget, False
        super().__init__(there)

    @property
    def alive(self) -> int:
        until = time.monotonic() + PATIENCE_S
        while (found := self._counted()) > self._budget and not self._waited:
            time.sleep(0.001)
            self._waited = time.monotonic() > until
        return found

    def _counted(self) -> int:
        theirs = {tier._memory.untyped_storage().data_ptr() for tier in self._tiers}
        there = [reference() for reference in list(self._known.values())]
        return sum(one.nbytes() for one in there if one is not None and one.data_ptr() not in theirs)


@contextmanager
def watched(peaks: list[int], budget: float = math.inf) -> Iterator[None]:
    """Adds to `peaks` the most that an observer sees alive, who knows nothing of a plan, in each run of a step; beyond
    the `budget` it is looked at twice."""
    run, reserve = Executable.run, MemoryTier.reserve
    tiers: set[MemoryTier] = set()

    def reserved(self: MemoryTier, *args: Any) -> None:
        tiers.add(self)
        reserve(self, *args)

    def seen(self: Executable, tensors: dict[str, torch.Tensor], host: Any = None) -> Any:
        if host is None:
            # No step: gathers of an evaluation, for one.
            return run(self, tensors)

        def asked(point: HostPoint, values: Any) -> Any:
            # The batch of the next step is loaded there, which is not this step's.
            Observer.looking = point is not HostPoint.LOAD
            try:
                return host(point, values)
            finally:
                Observer.looking = True

        with _OfDevice(list(tensors.values()), tiers, budget) as observer:
            try:
                return run(self, tensors, asked)
            finally:
                peaks.append(observer.peak)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "run", seen)
        patch.setattr(MemoryTier, "reserve", reserved)
        yield
