"""Watches what a step's graph holds on the device, without knowing of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from harness.observer import Observer
from hyper_parallel.graph import Executable
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.offloading.tiers.memory_tier import MemoryTier


class _OfDevice(Observer):
    """Does not see what lies in these tiers' own memory, on which the host computes updates."""

    def __init__(self, there: Sequence[torch.Tensor], tiers: set[MemoryTier]) -> None:
        self._tiers = tiers
        super().__init__(there)

    @property
    def alive(self) -> int:
        theirs = {tier._memory.untyped_storage().data_ptr() for tier in self._tiers}
        there = [reference() for reference in list(self._known.values())]
        return sum(one.nbytes() for one in there if one is not None and one.data_ptr() not in theirs)


@contextmanager
def watched(peaks: list[int]) -> Iterator[None]:
    """Adds to `peaks` the most that an observer sees alive, who knows nothing of a plan, in each run of a step."""
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

        with _OfDevice(list(tensors.values()), tiers) as observer:
            try:
                return run(self, tensors, asked)
            finally:
                peaks.append(observer.peak)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "run", seen)
        patch.setattr(MemoryTier, "reserve", reserved)
        yield
