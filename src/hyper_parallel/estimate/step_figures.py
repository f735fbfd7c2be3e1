"""Memory and communication of one rank's step, read off its StepGraph.

With alive(t) the bytes of the storages that are alive at node t (`graph.liveness`), by kind:

    saved      activations alive where the first backward pass begins, by the module that made them
    gathered   max over t of weights that were computed from parameters: gathered or cast
    transient  max over t of activations and temporaries, less what is saved
    peak       max over t of everything, what comes from outside included

Layers of one kind cost the same, and what is at the ends of a model does not grow with it. So each figure, and each
count of collectives, of a model with n layers of a kind is that of k captured layers (`LAYERS`) and the difference
that one layer more makes (`StepFigures.plus`):

    f(n) = f(k) + (n − k) · (f(k + 1) − f(k))

Micro-batches differ in the first and the last; those between are alike (`captured_micro_batches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import bytes_received
from hyper_parallel.graph import Lifetime, StepGraph, lifetimes
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.liveness import peak_of
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Collective

LAYERS = 2
"""Layers of each kind that are captured: with one, the ends of the model may hold more than a layer does."""

Calls = Counter[tuple[str, str, str, str]]
"""(axis, link levels, kind, "count" or "bytes") to how much; bytes are those that the rank receives."""


@dataclass(frozen=True)
class Resident:
    """Bytes that one rank keeps of one parameter."""

    parameter: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class StepFigures:
    """What one rank holds and sends in a step. All figures are bytes."""

    saved: Counter[str]
    """By the module that made them, activations that wait for the backward pass of a micro-batch."""
    gathered: int
    transient: int
    peak: int
    calls: Calls

    def plus(self, more: StepFigures, times: int, fewer: StepFigures) -> StepFigures:
        """This and `times` what `more` has beyond `fewer`: what one layer more costs."""

        def sums(name: str) -> Counter[Any]:
            here, there, base = (getattr(one, name) for one in (self, more, fewer))
            return Counter({key: here[key] + times * (there[key] - base[key]) for key in {**here, **there}})

        def grown(name: str) -> int:
            here, there, base = (getattr(one, name) for one in (self, more, fewer))
            return int(here + times * max(there - base, 0))

        return StepFigures(sums("saved"), grown("gathered"), grown("transient"), grown("peak"), sums("calls"))


def captured_micro_batches(count: int) -> tuple[int, ...]:
    """How many of a step's `count` micro-batches each one that is written out stands for, in order."""
    return (1, count - 2, 1) if count > 3 else (1,) * count


def figures_of(
    step: StepGraph, strategy: Strategy, stands_for: tuple[int, ...], pattern: Callable[[str], str]
) -> StepFigures:
    """The figures of a captured step; `stands_for` as of `captured_micro_batches`, `pattern` names a module's row."""
    nodes = list(step.nodes)
    lives = lifetimes(step)
    begins = next((at for at, node in enumerate(nodes) if region_of(node).phase == "backward"), len(nodes))
    saved: Counter[str] = Counter()
    for life in lives:
        if life.kind == "activation" and life.born < begins <= life.died:
            saved[pattern(life.module)] += life.bytes
    working = _most(lives, lambda life: life.kind in ("activation", "temporary"))
    return StepFigures(
        saved,
        _most(lives, lambda life: life.kind == "parameter" and life.born >= 0),
        max(working - saved.total(), 0),
        peak_of(lives).bytes,
        calls_of(step, nodes, strategy, stands_for),
    )


def resident_of(step: StepGraph) -> dict[str, Resident]:
    """By parameter name, what the step's rank keeps of it; counts of updates, of 4 bytes each, are left out."""
    sizes: dict[str, Counter[str]] = {}
    for storage, entry in step.outside.items():
        kind, _, name = entry.name.partition(".")
        if kind == "optimizer":
            state, _, name = name.partition(".")
            kind = "" if state == "step" else kind
        if kind in ("parameter", "optimizer"):
            sizes.setdefault(name, Counter())[kind] += step.storages[storage].bytes
    for storage, name in step.gradients.items():
        sizes[name]["gradient"] += step.storages[storage].bytes
    return {
        name: Resident(size["parameter"], size["gradient"], size["optimizer"]) for name, size in sizes.items()
    }


def _most(lives: list[Lifetime], chosen: Callable[[Lifetime], bool]) -> int:
    return peak_of([life for life in lives if chosen(life)]).bytes


def calls_of(
    step: StepGraph, nodes: Iterable[fx.Node], strategy: Strategy, stands_for: tuple[int, ...]
) -> Calls:
    """What these nodes of a step send; `stands_for` as of `figures_of`."""
    found: Calls = Counter()
    cluster = Cluster.of(strategy) if strategy.placement.given else None
    priced = costs(step)
    for node in nodes:
        cost = priced.get(node)
        if not isinstance(cost, Collective):
            continue
        # The norm and the optimizer's collectives are of the whole step.
        micro_batch = region_of(node).micro_batch
        times = 1 if micro_batch is None else stands_for[micro_batch]
        ranks = len(cost.ranks)
        everyone = ranks == strategy.axes.world and "*" in cost.axis
        levels = " · ".join(cluster.spans(cost.ranks)) if cluster is not None else ""
        key = ("all ranks" if everyone else cost.axis, levels, cost.kind)
        found[(*key, "count")] += times
        found[(*key, "bytes")] += times * bytes_received(cost.kind, ranks, cost.bytes)
    return found
