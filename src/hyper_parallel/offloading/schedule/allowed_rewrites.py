"""Rewrites that the offload planner may use: host updates, reordering, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.cluster_uses import cluster_uses
from hyper_parallel.graph.host_update import is_update
from hyper_parallel.graph.low_precision_grads import narrow
from hyper_parallel.offloading.schedule.choose_recompute import Ladder, again, ladder
from hyper_parallel.offloading.schedule.graph_search import Dial
from hyper_parallel.offloading.schedule.host_update_pass import PARTS, in_parts
from hyper_parallel.offloading.schedule.problem import OffloadTier, Problem
from hyper_parallel.strategy.memory import Memory, Where
from hyper_parallel.units import format_bytes, format_duration

SHARES = 4
"""Of what computing again could free: steps of the dial."""


@dataclass(frozen=True)
class Choices:
    """What a planner may do to a step beside moving its memory. None of it changes a bit of what the step computes."""

    recompute: bool = True
    """Compute storages again rather than keep or copy them."""
    order: bool = True
    """Run nodes in another order."""
    update: Where = "auto"
    """Run the optimizer's updates on the host: `host` all that can be, `auto` as many as make the step quicker."""

    @classmethod
    def of(cls, memory: Memory) -> Choices:
        """Those that a strategy leaves open."""
        return cls(recompute=memory.recompute == "auto", update=memory.update)

    def dials(
        self,
        step: StepGraph,
        cluster: Cluster,
        spaces: Iterable[OffloadTier],
        problem_of: Callable[[StepGraph], Problem],
        sizes: Mapping[Any, int],
    ) -> tuple[Dial, ...]:
        """Those that the search may turn for a step. `problem_of`: a graph's memory; `sizes`: values of what the data
        decide."""
        found = []
        parts = in_parts(step, spaces) if self.update == "auto" else None
        if parts is not None:
            found.append(Dial("update", PARTS + 1, 0, parts))
        if self.order:
            found.append(Dial("order", 3, 2, _Order(sizes, self.recompute)))
        if self.recompute:
            found.append(Dial("recompute", SHARES + 1, 1, _Again(cluster, problem_of, sizes)))
        return tuple(found)


ANY = Choices()
"""All of them."""


class _Order:
    """0: as captured; 1: updates in the order of the model; 2: from its end to its beginning."""

    def __init__(self, sizes: Mapping[Any, int], recompute: bool) -> None:
        self._sizes, self._recompute = sizes, recompute

    def __call__(self, step: StepGraph, setting: int, refused: bool) -> StepGraph:
        made = cluster_uses(step, self._sizes, backwards=setting == 2)
        return narrow(made, self._sizes) if self._recompute else made


class _Again:
    """How much is computed again, in parts of what may be."""

    def __init__(
        self, cluster: Cluster, problem_of: Callable[[StepGraph], Problem], sizes: Mapping[Any, int]
    ) -> None:
        self._cluster, self._problem_of, self._sizes = cluster, problem_of, sizes
        self._ladders: dict[StepGraph, Ladder] = {}

    def __call__(self, step: StepGraph, setting: int, refused: bool) -> StepGraph:
        if step not in self._ladders:
            problem = self._problem_of(step)
            self._ladders[step] = ladder(step, problem, self._cluster, self._sizes, must=refused)
        return again(step, self._ladders[step], setting / SHARES)


def changes(before: StepGraph, after: StepGraph, problem: Problem) -> tuple[str, ...]:
    """What was chosen for a step, in words, one for each kind of choice. `problem`: the memory of `after`."""
    found = []
    there = {node.name for node in before.nodes}
    repeated = [
        (at, node)
        for at, node in enumerate(after.nodes)
        if node.meta["recomputed"] and node.name not in there
    ]
    if repeated:
        made = {value.storage for _, node in repeated for value in values_of(node)}
        again = [problem.by_storage[storage] for storage in made if storage >= len(before.storages)]
        seconds = sum(problem.starts[at + 1] - problem.starts[at] for at, _ in repeated)
        found.append(
            f"{len(again)} storages ({format_bytes(sum(held.bytes for held in again))}) computed again in "
            f"{format_duration(seconds)}"
        )
    apart = sum(is_update(node) for node in after.nodes)
    if apart:
        found.append(f"{apart} parameter{'s' if apart > 1 else ''} updated on the host")
    place = {node.name: at for at, node in enumerate(after.nodes)}
    order = [place[node.name] for node in before.nodes if node.name in place]
    if any(second < first for first, second in pairwise(order)):
        found.append("nodes in another order")
    return tuple(found)
