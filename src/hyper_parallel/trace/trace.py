"""Trace: the ops of every rank in one step, with their dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.trace.op import Bytes, Op
from hyper_parallel.trace.validate import check


@dataclass(frozen=True)
class Trace:
    """The ops of each rank class. Ranks that run the same ops share a class, and are simulated once.

    `Trace.check` validates it; `simulate` calls `check`.
    """

    ops: Mapping[str, tuple[Op, ...]]
    """Class to its ops. The ops of one queue run in this order."""
    classes: Mapping[int, str]
    """Rank to class, for all ranks."""
    resident: Mapping[str, tuple[Bytes, ...]] = field(default_factory=dict)
    """Class to the storages that are alive when the step begins."""
    model_flops: float = 0.0
    """Model FLOPs of the step, all ranks together, by the convention of `workload.flops`; 0 where not known."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def first(self, name: str) -> int:
        """The lowest rank of a class, which represents the others."""
        return self._firsts[name]

    def size(self, name: str) -> int:
        """The number of ranks in a class."""
        return self._sizes[name]

    def check(self) -> None:
        """Raise TraceError if the trace cannot run: see `trace.validate`."""
        check(self)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.classes)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold anything, `device` first."""
        names = {held.tier for of in self.resident.values() for held in of}
        names |= {held.tier for ops in self.ops.values() for op in ops for held in op.allocates}
        return tuple(sorted(names, key=lambda name: (name != "device", name)))

    def __post_init__(self) -> None:
        firsts: dict[str, int] = {}
        for rank in sorted(self.classes):
            firsts.setdefault(self.classes[rank], rank)
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_sizes", Counter(self.classes.values()))

    _firsts: Mapping[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
