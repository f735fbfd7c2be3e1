"""Equivalent graphs of a step under a budget, and the best of them: searched on all layers, or on few and then applied.

A setting of the dials (`graph_search`) is a share: of the updates that run on the host, of what is computed again. It
means the same for a step of few layers, so that a step that has one (`StepGraph.short`) is searched there; all layers
are turned to the settings that were found, and planned once. Moves are those of all layers: planned, not copied.

The short step stands for all layers (`_miniature`): with k of L layers, what is outside of layers counts k / L of its
seconds and bytes; else a large embedding, whose state moves once a step, would hide what layers wait for. So many fewer
gaps of it are looked at (`solve.choose`, `part`), as those of all layers are too many for all to be. It has k / L of
what is too much: with the peaks P of all layers and P' of few,

    budget(short) = P' − (P − budget) · k / L

Where the short step or what it found has no plan, all layers are searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dynamic_sizes import largest_sizes
from hyper_parallel.graph.host_nodes import is_update
from hyper_parallel.graph.step_context import region_of, storage_layers
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.build_problem import Costs, build_problem
from hyper_parallel.offloading.schedule.graph_search import Dial, Variant, search
from hyper_parallel.offloading.schedule.host_update_pass import on_host
from hyper_parallel.offloading.schedule.planning_progress import PlanningProgress
from hyper_parallel.offloading.schedule.problem import OffloadTier, Problem
from hyper_parallel.offloading.schedule.solve import choose
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work

Memory = Callable[[StepGraph], Problem]
"""The problem of a graph."""

STAGES = 8
"""What planning all layers once takes, in quick tries of a graph with as many nodes."""


@dataclass(frozen=True)
class Settings:
    """A setting of each dial."""

    dials: tuple[str, ...]
    at: tuple[int, ...]
    refused: bool
    """No plan of the step as it is meets the budget."""


@dataclass(frozen=True, eq=False)
class EqualGraphs:
    """The graphs that a step may be made under a budget. Fields are arguments of `planned`."""

    step: StepGraph
    cluster: Cluster
    budget: int
    spaces: tuple[OffloadTier, ...]
    load: float
    choices: Choices

    part: float = 1.0
    """The share of its layers that a short step has."""

    @cached_property
    def memory(self) -> Memory:
        """The problem of each graph, built once."""
        sizes, largest = balanced_sizes(self.step), largest_sizes(self.step, self.load)

        def problem(graph: StepGraph) -> Problem:
            priced = self._priced(graph)
            built = build_problem(graph, self.cluster, self.budget, self.spaces, sizes, largest, priced)
            return built if self.part == 1.0 else _miniature(graph, built, self.part)

        return cache(problem)

    @cached_property
    def _work(self) -> dict[str, Work | Collective]:
        """What each node of the step does, by its name."""
        return {node.name: work for node, work in costs(self.step, balanced_sizes(self.step)).items()}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(node.name for node in self.step.nodes)

    def _priced(self, graph: StepGraph) -> Costs:
        """What each node of a graph does. One that keeps its name does the same, unless the host does it."""
        # The name of a node that went may be given to one that is repeated.
        new = [
            node
            for node in graph.nodes
            if node.name not in self._names or "origin" in node.meta or is_update(node)
        ]
        priced = costs(graph, balanced_sizes(self.step), new)
        known = dict(self._work)
        for node in new:
            known.pop(node.name, None)
        return {node: known[node.name] for node in graph.nodes if node.name in known} | priced

    @cached_property
    def captured(self) -> Problem:
        """The memory of the step as it was given."""
        return self.memory(self.step)

    @cached_property
    def _begun(self) -> StepGraph:
        return on_host(self.step, self.spaces) if self.choices.update == "host" else self.step

    @cached_property
    def _dials(self) -> tuple[Dial, ...]:
        sizes = balanced_sizes(self.step)
        return self.choices.dials(self.step, self.cluster, self.spaces, self.memory, sizes, self._priced)

    def best(self, progress: PlanningProgress) -> Variant:
        """The best graph found for all layers. Raises BudgetError where no graph has a plan."""
        found = self._search(progress, 0)
        # The search tries many graphs and looks at each a little; what it has found is worth a longer look.
        return replace(found, plan=choose(found.problem)) if found.plan.stall else found

    def _search(self, progress: PlanningProgress, later: int) -> Variant:
        """The best graph found. `later`: nodes that are looked at after this. Raises BudgetError."""
        nodes = self.captured.nodes

        def tried(count: int, left: int) -> None:
            todo = left * nodes + later
            progress.advance(nodes if count > 1 else 0, todo, f"graph {count} of at most {count + left}")

        begun = self.memory(self._begun)
        return search(self._begun, begun, self._dials, self.memory, tried, self.part)

    def turned(self, to: Settings) -> Variant | None:
        """The graph at these settings, and its best plan; None where it has other dials, or no plan."""
        if to.dials != tuple(dial.name for dial in self._dials):
            return None
        graph = self._begun
        for dial, setting in zip(self._dials, to.at, strict=True):
            graph = dial.turn(graph, setting, to.refused) if setting else graph
        problem = self.memory(graph)
        try:
            return Variant(to.at, graph, problem, choose(problem))
        except BudgetError:
            return None

    def settings_of_few_layers(self, progress: PlanningProgress) -> Settings | None:
        """The best settings for the step with few of its layers; None where there is no such step, or no plan."""
        if self.step.short is None or self.budget < self.captured.working_set:
            return None
        step = self.step.short()
        part = _layers(step) / _layers(self.step)
        apart = _outside_of_layers(step)
        # State that updates on the host leave there counts whole.
        more_room = int((1 - part) * sum(step.storages[one].bytes for one in apart & step.outside.keys()))
        room = tuple(replace(space, bytes=int(space.bytes * part) + more_room) for space in self.spaces)
        short = replace(self, step=step, spaces=room, part=part)
        least, peak = short.captured.working_set, max(short.captured.profile(), default=0)
        over = max(self.captured.profile(), default=0) - self.budget
        budget = max(least, peak - int(over * part))
        short = replace(short, budget=budget)
        try:
            found = short._search(progress, STAGES * self.captured.nodes)
        except BudgetError:
            return None
        return Settings(tuple(dial.name for dial in short._dials), found.settings, found.refused)


def _miniature(step: StepGraph, problem: Problem, part: float) -> Problem:
    """The problem of a step with this share of the layers as if it had as little beside them."""
    apart = _outside_of_layers(step)
    shares = [1.0 if region_of(node).layer else part for node in step.nodes]
    lasts = [(end - start) * one for (start, end), one in zip(pairwise(problem.starts), shares, strict=True)]
    held = tuple(
        replace(one, bytes=_scaled(one.bytes, part)) if one.storage in apart else one for one in problem.held
    )
    taken = tuple(replace(one, bytes=_scaled(one.bytes, shares[one.first])) for one in problem.taken)
    updates = tuple(replace(one, seconds=one.seconds * shares[one.place]) for one in problem.updates)
    return replace(
        problem, starts=tuple(accumulate(lasts, initial=0.0)), held=held, taken=taken, updates=updates
    )


def _scaled(count: int, part: float) -> int:
    return max(1, int(count * part)) if count else 0


def _outside_of_layers(step: StepGraph) -> set[int]:
    """The storages that no layer makes or brings."""
    return {storage for storage, layer in storage_layers(step.graph.nodes).items() if not layer}


def _layers(step: StepGraph) -> int:
    return len({region_of(node).layer for node in step.nodes} - {""})
