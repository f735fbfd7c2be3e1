"""Rewrites that the offload planner may use: host updates, reordering, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, recompute, values_of
from hyper_parallel.graph.host_nodes import is_update
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.recompute import affordable
from hyper_parallel.graph.recompute_policies import narrow
from hyper_parallel.graph.reorder_for_memory import cluster_uses
from hyper_parallel.offloading.schedule.build_problem import Costs
from hyper_parallel.offloading.schedule.graph_search import Dial
from hyper_parallel.offloading.schedule.host_update_pass import PARTS, in_parts
from hyper_parallel.offloading.schedule.problem import Buffer, OffloadTier, Problem
from hyper_parallel.strategy.memory import Memory, Where
from hyper_parallel.units import format_bytes, format_duration
from hyper_parallel.workload.work import Work

SHARES = 4
"""Of what computing again could free: steps of the dial."""


@dataclass(frozen=True)
class Choices:
    """The rewrites of a step that a planner may make beside moving its memory. None of it changes a bit of what the
    step computes."""

    recompute: bool = True
    """Compute storages again rather than keep or copy them."""
    order: bool = True
    """Run nodes in another order."""
    update: Where = "auto"
    """Run the optimizer's updates on the host: `host` all that can be, `auto` as many as make the step quicker."""

    @classmethod
    def of(cls, memory: Memory) -> Choices:
        """The choices that a strategy leaves open."""
        return cls(recompute=memory.recompute == "auto", update=memory.update)

    def dials(
        self,
        step: StepGraph,
        cluster: Cluster,
        spaces: Iterable[OffloadTier],
        problem_of: Callable[[StepGraph], Problem],
        sizes: Mapping[Any, int],
        work_of: Callable[[StepGraph], Costs],
    ) -> tuple[Dial, ...]:
        """The dials that the search may turn for a step. `problem_of`: a graph's memory; `sizes`: values of what the
        data decide; `work_of`: what each node of a graph does."""
        found = []
        parts = in_parts(step, spaces) if self.update == "auto" else None
        if parts is not None:
            found.append(Dial("update", PARTS + 1, 0, parts))
        if self.order:
            found.append(Dial("order", 3, 2, _Order(sizes, self.recompute)))
        if self.recompute:
            found.append(Dial("recompute", SHARES + 1, 1, _Again(cluster, problem_of, sizes, work_of)))
        return tuple(found)


ANY = Choices()
"""All of them."""


class _Order:
    """0: as captured; 1: updates in the order of the model; 2: from its end to its beginning."""

    def __init__(self, sizes: Mapping[Any, int], recompute: bool) -> None:
        self._sizes, self._recompute = sizes, recompute

    def __call__(self, step: StepGraph, setting: int, refused: bool) -> StepGraph:
        clustered = cluster_uses(step, self._sizes, backwards=setting == 2)
        return narrow(clustered, self._sizes) if self._recompute else clustered


class _Again:
    """How much is computed again, in parts of what may be."""

    def __init__(
        self,
        cluster: Cluster,
        problem_of: Callable[[StepGraph], Problem],
        sizes: Mapping[Any, int],
        work_of: Callable[[StepGraph], Costs],
    ) -> None:
        self._cluster, self._problem_of, self._sizes, self._work_of = cluster, problem_of, sizes, work_of
        self._ladders: dict[StepGraph, Ladder] = {}

    def __call__(self, step: StepGraph, setting: int, refused: bool) -> StepGraph:
        if step not in self._ladders:
            problem = self._problem_of(step)
            work = self._work_of(step)
            self._ladders[step] = ladder(step, problem, self._cluster, work, must=refused)
        return again(step, self._ladders[step], setting / SHARES)


def changes(before: StepGraph, after: StepGraph, problem: Problem) -> tuple[str, ...]:
    """The choices for a step, in words, one for each kind of choice. `problem`: the memory of `after`."""
    found = []
    there = {node.name for node in before.nodes}
    repeated = [
        (at, node)
        for at, node in enumerate(after.nodes)
        if node.meta["recomputed"] and node.name not in there
    ]
    if repeated:
        recomputed = {value.storage for _, node in repeated for value in values_of(node)}
        again = [problem.by_storage[storage] for storage in recomputed if storage >= len(before.storages)]
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


# Ranks storages by how much recomputing them beats copying them.
#
#     worth(s) = bytes(s) · Σ seconds, in its gap between the forward and the backward pass, over the budget / price(s)
#     price(s) = Σ seconds of the nodes that make it, beside those that are repeated for others anyhow
#
# A storage is a candidate where making it, from what stays, takes no longer than copying it out or back. What takes
# longer stays, so that the sums that run through all layers do not take all of the forward pass with them: each layer
# begins from what it was given. What a candidate is cast from stays too, where it has fewer bytes.
#
# The gaps are those of the step as it is; the planner says what a choice really comes to. After Jain et al.,
# "Checkmate", arXiv 1910.02653, which weighs one against the other exactly, and HyperOffload, arXiv 2602.00748, section
# 4.

NEARLY = 0.999
"""Of what could be gained: the rest comes in many storages of a few bytes."""
SLACK = 8.0
"""Times the seconds of a copy that making a storage may take, where no budget is met without."""


@dataclass(frozen=True)
class Ladder:
    """Storages that may be computed again."""

    storages: tuple[int, ...]
    """Those that are worth most first."""
    gains: tuple[float, ...]
    """Of the first, the first two, … of all: the share of bytes · seconds that they free."""
    kept: frozenset[int]
    """What they are made from, and stays for it."""

    def upto(self, share: float) -> tuple[int, ...]:
        """The storages that free this share of what all do."""
        count = sum(gain < share * NEARLY for gain in self.gains) + (share > 0)
        return self.storages[:count]


def ladder(
    step: StepGraph, problem: Problem, cluster: Cluster, works: Costs, *, must: bool = False
) -> Ladder:
    """The storages that may be computed again of a step whose memory is `problem`.

    `works`: what its nodes do. `must`: no plan of the step as it is meets the budget.
    """
    nodes = list(step.nodes)
    # What would do is the same for every budget that is too small.
    over = _over(replace(problem, budget=0) if must else problem)
    freed = {
        held.storage: held.bytes * over_time
        for held in problem.held
        if (over_time := _idle(held, nodes, over)) > 0
    }
    kept = _narrower(step, nodes, problem, freed.keys())
    seconds = _seconds(cluster, works)
    limits = {storage: (SLACK if must else 1.0) * _copied(problem, storage) for storage in freed}
    prices = affordable(step, limits, seconds, collectives="none", kept=kept)
    least = min((price for price in prices.values() if price > 0), default=1.0)
    order = sorted(prices, key=lambda storage: (-freed[storage] / max(prices[storage], least), storage))
    total = sum(freed[storage] for storage in order)
    return Ladder(
        tuple(order), tuple(gain / total for gain in accumulate(map(freed.__getitem__, order))), kept
    )


def again(step: StepGraph, found: Ladder, share: float) -> StepGraph:
    """The step with the best of its storages computed again, as many as free this share of what all do.

    No collective is repeated: every rank chooses for itself.
    """
    return recompute(step, found.upto(share), collectives="none", kept=found.kept)


def _over(problem: Problem) -> list[float]:
    """For each node: seconds, up to it, in which the step as it is holds more than its budget."""
    lasts = (after - before for before, after in pairwise(problem.starts))
    over = (
        last if live > problem.budget else 0.0 for last, live in zip(lasts, problem.profile(), strict=True)
    )
    return list(accumulate(over, initial=0.0))


def _idle(held: Buffer, nodes: list[fx.Node], over: list[float]) -> float:
    """Seconds over the budget between a storage's last use in the forward pass and its first in the backward pass."""
    if held.state or nodes[held.busy[0].first].meta["region"].phase not in ("forward", "loss"):
        return 0.0
    for before, after in pairwise(held.busy):
        if nodes[after.first].meta["region"].phase == "backward":
            return over[after.first] - over[before.last + 1]
    return 0.0


def _narrower(step: StepGraph, nodes: list[fx.Node], problem: Problem, wanted: Set[int]) -> frozenset[int]:
    """What storages that are wanted again were made of, where nothing late uses it and it has fewer bytes."""
    bytes_of = {held.storage: held.bytes for held in problem.held}
    found = set()
    for node in nodes:
        fresh = {value.storage for value in values_of(node)} - touched(node)
        for storage in fresh & wanted:
            found |= {
                source
                for source in touched(node) - wanted
                if step.storages[source].name is None and bytes_of[source] < bytes_of[storage]
            }
    return frozenset(found)


def _seconds(cluster: Cluster, works: Costs) -> dict[fx.Node, float]:
    """Seconds of each node that computes, alone on the device."""
    device = cluster.device
    assert device is not None, "the step was simulated on it"
    known: dict[Work, float] = {}
    found = {}
    for node, work in works.items():
        if isinstance(work, Work):
            if work not in known:
                known[work] = device.seconds(work)
            found[node] = known[work]
    return found


def _copied(problem: Problem, storage: int) -> float:
    """Seconds that a link is busy with a storage's copies out and back, in the fastest space."""
    count, space = problem.by_storage[storage].bytes, problem.spaces[0]
    return max(space.out.seconds(count), space.back.seconds(count))
