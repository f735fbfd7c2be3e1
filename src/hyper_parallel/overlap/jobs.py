"""Jobs for list scheduling: duration, memory and queue of each node.

    seconds = device.seconds(work)                      of a kernel                  (`cluster.device`)
            = cluster.collective_seconds(...)           of a collective, alone       (`cluster.collective_cost`)
            = 0                                         of views, waits and numbers

A lane is a micro-batch. Clipping and the optimizer, which are of none, have a lane of their own, the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import Input, StepGraph, lifetimes, values_of
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.graph_writer import GraphWriter
from hyper_parallel.graph.ir import is_collective, is_wait
from hyper_parallel.graph.liveness import Lifetime, of_weights
from hyper_parallel.graph.memory_effects import begun, storages_of
from hyper_parallel.graph.step_context import Phase, region_of
from hyper_parallel.overlap.chunked_matmul import KINDS, WHOLE, Chunked, Chunks, patterns
from hyper_parallel.overlap.list_scheduling import COMPUTE, FREE, Job, arrange
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work

Costs = Mapping[str, Work | Collective]
"""What nodes do, by their names: the same in any order of a step."""


@dataclass(frozen=True)
class Priced:
    """A step with the facts about it that are read again and again."""

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
        """Seconds of a `Work` or a `Collective`; 0 for a view."""
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
        fresh = {storage for storage in storages_of([node]) if storage in own and storage not in seen}
        seen |= fresh
        makes.append(tuple(sorted((storage, own[storage].bytes) for storage in fresh)))
        held = {storage for storage in held | fresh if storage in own and own[storage].died < len(nodes)}
        uses.append(tuple(sorted(held)))
    return makes, uses


# Layer window: a few layers as a step of their own, for fast trials.
#
# What comes from elsewhere comes from outside, and is there. The layers are taken from the middle, where a step has
# most of them and each is like the next one. The two passes are looked at one by one: nothing would hold them apart.


def excerpt(step: StepGraph, layers: int, phase: Phase) -> StepGraph:
    """One pass through this number of layers of a step; through all where it has no more."""
    nodes = list(step.nodes)
    order: dict[str, None] = {}
    for node in nodes:
        if region_of(node).phase == "forward" and region_of(node).layer:
            order.setdefault(region_of(node).layer)
    names = list(order)
    first = max(0, (len(names) - layers + 1) // 2)
    chosen = set(names[first : first + layers])
    weights = of_weights(step, nodes)
    writer = GraphWriter(step)
    writer.gradients.clear()
    kinds = {node: entry.kind for entry, node in zip(step.inputs, step.placeholders, strict=True)}
    kept = [node for node in nodes if region_of(node).layer in chosen and region_of(node).phase == phase]
    inside = set(kept)
    for node in kept:
        for source in node.all_input_nodes:
            if source in inside or source in writer.made:
                continue
            if source.op == "get_attr":
                writer.add_constant(source)
            else:
                lasting = kinds.get(source) == "parameter" or any(
                    value.storage in weights for value in values_of(source)
                )
                entry = Input(source.name, "parameter" if lasting else "input")
                writer.made[source] = writer.add_input(entry, source, source.meta.get("value"))
    for node in kept:
        writer.emit(node)
    return writer.result({}, phase)


_LAYERS = 2
_COUNTS = (2, 4, 8)
_PAYS = 0.995
"""Of the time of the layers, what must be left at most: less gained than that is noise of the model."""


def chunks_for(
    step: StepGraph, prices: Prices, sizes: Mapping[Any, int], together: int, window: float
) -> Chunks:
    """The pieces that pay, as far as a few layers tell; `together` and `window` as of `arrange`."""
    return Chunks(
        _best(excerpt(step, _LAYERS, "forward"), prices, sizes, together, window),
        _best(excerpt(step, _LAYERS, "backward"), prices, sizes, together, window),
    )


def _best(
    step: StepGraph,
    prices: Prices,
    sizes: Mapping[Any, int],
    together: int,
    window: float,
) -> Chunked:
    def seconds(pieces: Chunked) -> float:
        chunked = Chunks(pieces, pieces)(step) if pieces != WHOLE else step
        jobs = jobs_of(Priced.of(chunked, sizes), prices).jobs
        return arrange(jobs, window=window, together=together, slowdown=prices.slowdown).seconds

    there = {found.kind for found in patterns(step)}
    best, least = WHOLE, seconds(WHOLE)
    for kind in KINDS:
        if kind not in there:
            continue
        for count in _COUNTS:
            pieces = replace(best, **{kind: count})
            taken = seconds(pieces)
            if taken >= least * _PAYS:
                # Where fewer pieces do not pay, more of them cost more calls.
                break
            best, least = pieces, taken
    return best
