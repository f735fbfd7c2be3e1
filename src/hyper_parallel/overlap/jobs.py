"""Jobs for list scheduling: duration, memory and queue of each node.

    seconds = device.seconds(work)                      of a kernel                  (`cluster.device`)
            = cluster.collective_seconds(...)           of a collective, alone       (`cluster.collective_cost`)
            = 0                                         of views, waits and numbers

A lane is a micro-batch. Clipping and the optimizer, which are of none, have a lane of their own, the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, lifetimes
from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.liveness import Lifetime
from hyper_parallel.graph.memory_effects import begun, storages_of
from hyper_parallel.graph.regions import region_of
from hyper_parallel.overlap.list_scheduling import COMPUTE, FREE, Job
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work

Costs = Mapping[str, Work | Collective]
"""What nodes do, by their names: the same in any order of a step."""


@dataclass(frozen=True)
class Priced:
    """A step with what is asked of it again and again."""

    step: StepGraph
    sizes: Mapping[Any, int]
    """Values of sizes that the data decide."""
    costs: Costs
    lives: list[Lifetime]

    @classmethod
    def of(cls, step: StepGraph, sizes: Mapping[Any, int] | None = None, like: Costs | None = None) -> Priced:
        """`sizes` gives the symbols of the step's sizes values. `like`: costs of another step, whose nodes do the same
        as those of their names in this one."""
        known = dict(sizes or {})
        found = dict(like or {})
        new = [node for node in step.nodes if node.name not in found]
        found.update((node.name, cost) for node, cost in costs(step, known, new).items())
        return cls(step, known, found, lifetimes(step, known))


@dataclass(frozen=True)
class Jobs:
    """A step's nodes in its order, with the job that each is."""

    of: Priced
    nodes: tuple[fx.Node, ...]
    jobs: tuple[Job, ...]
    lanes: int
    """Micro-batches."""
    needs: Mapping[fx.Node, Collection[fx.Node]]
    """What each node comes after; as of `dependencies`."""


class Prices:
    """Seconds on a cluster; equal work is priced once."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.device is not None, "a cluster with a device"
        self._cluster, self._device = cluster, cluster.device
        self._known: dict[Any, float] = {}
        self._same: dict[int, tuple[Any, float]] = {}
        """By the identity of what was priced, which is kept: nodes that are alike have one `Work`."""

    @property
    def slowdown(self) -> float:
        """How many times as long a kernel takes beside a collective."""
        return self._device.comm_slowdown

    def seconds(self, cost: Any) -> float:
        """Of a `Work` or a `Collective`; 0 for a view."""
        found = self._same.get(id(cost))
        if found is None:
            found = self._same[id(cost)] = cost, self._seconds(cost)
        return found[1]

    def _seconds(self, cost: Any) -> float:
        if isinstance(cost, Collective):
            key = (cost.kind, cost.bytes, cost.ranks)
            if key not in self._known:
                self._known[key] = self._cluster.collective_seconds(cost.kind, cost.bytes, cost.ranks)
            return self._known[key]
        if cost.kind == "view":
            return 0.0
        if cost not in self._known:
            self._known[cost] = self._device.seconds(cost)
        return self._known[cost]


def jobs_of(of: Priced, prices: Prices) -> Jobs:
    """The jobs of a step."""
    step = of.step
    nodes = tuple(step.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    # Which of a group's collectives comes first is for the new order to say.
    needs = dependencies(step, [node for node in nodes if is_collective(node)])
    makes, uses = _memory(nodes, of.lives)
    lanes = lanes_of(step)
    jobs = []
    pieces: dict[tuple[str, int], int] = {}
    for at, node in enumerate(nodes):
        cost = of.costs.get(node.name)
        seconds = prices.seconds(cost) if cost is not None else 0.0
        after = {place[other] for other in needs[node]}
        queue = FREE if not seconds else COMPUTE
        if isinstance(cost, Collective):
            queue = f"comm:{cost.axis}"
            # Pieces of one collective go in their order, so that what an early one waits for is more urgent.
            whole, piece = node.meta.get("chunk", ("", 0))
            if (whole, piece - 1) in pieces:
                after.add(pieces[whole, piece - 1])
            pieces[whole, piece] = at
        jobs.append(
            Job(
                seconds,
                queue,
                tuple(sorted(after)),
                place[begun(node)] if is_wait(node) else None,
                makes[at],
                uses[at],
                lanes[node],
            )
        )
    return Jobs(of, nodes, tuple(jobs), max(lanes.values(), default=0), needs)


def lanes_of(step: StepGraph) -> dict[fx.Node, int]:
    """The lane of each node that computes."""
    regions = {node: region_of(node) for node in step.nodes}
    numbers = {region.micro_batch for region in regions.values()} - {None}
    last = 1 + max(numbers, default=-1)  # type: ignore[type-var, operator]
    return {
        node: last if region.micro_batch is None else region.micro_batch for node, region in regions.items()
    }


def _memory(
    nodes: Sequence[fx.Node], lives: Sequence[Lifetime]
) -> tuple[list[tuple[tuple[int, int], ...]], list[tuple[int, ...]]]:
    """For each node (storage, bytes) that it allocates, and the storages that must be there while it runs."""
    own = {life.storage: life for life in lives if life.born >= 0}
    makes: list[tuple[tuple[int, int], ...]] = []
    uses: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for node in nodes:
        held = storages_of(node.all_input_nodes)
        if is_wait(node):
            # What a collective was given stays until it is done.
            held |= storages_of(begun(node).all_input_nodes)
        made = {storage for storage in storages_of([node]) if storage in own and storage not in seen}
        seen |= made
        makes.append(tuple(sorted((storage, own[storage].bytes) for storage in made)))
        held = {storage for storage in held | made if storage in own and own[storage].died < len(nodes)}
        uses.append(tuple(sorted(held)))
    return makes, uses
