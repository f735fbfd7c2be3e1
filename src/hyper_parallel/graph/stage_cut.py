"""The cut of a layer list into pipeline stages: by given counts, or balanced by cost.

With w_1 … w_n the costs of the layers, w_0 that of what comes before the first one (embeddings, encoders) and w_(n+1)
that of what comes after the last one (final norm, head, loss), a cut into S stages gives stage s consecutive layers and
the cost c_s; the ends are part of the first and of the last stage. `balanced_counts` minimizes, in this order,

    max_s c_s                 a pipeline is as fast as its slowest stage
    Σ_s c_s²                  of cuts that are as fast, the most even one: no stage is larger than it has to be
    counts, lexicographic     of cuts that are as even, the one whose earlier stages have fewer layers: under 1F1B
                              stage s holds S − s micro-batches, so that a layer in an earlier stage saves more bytes

by dynamic programming over (stage, first layer), exactly: costs are floats, whose sums are taken as integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from torch import fx

from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.costs import Pricer
from hyper_parallel.graph.dependencies import data_sources
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.ir import StepGraph
from hyper_parallel.graph.partition import StageOf, label
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.trace import Collective

NodeCost = Callable[[fx.Node], float]
"""Cost of a node, of a step or of its stages, in any unit; 0 for one that does nothing."""

FLOPS_PER_BYTE = 10.0
"""FLOPs that a CPU core computes while it moves a byte, about 100 GFLOP/s beside 10 GB/s: an estimate."""


def layer_stages(layers: str, counts: Sequence[int], step: StepGraph | None = None) -> StageOf:
    """The stages of a model's modules, where stage s has the next `counts[s]` layers.

    `layers`: the name of the layer list. Modules outside of it have no stage of their own: by the data flow, what comes
    before the first layer is in the first stage and what comes after the last layer in the last one. Where an end stage
    has no layers, `step` has to tell which modules these are.

    Raises StrategyError for counts that the model's layers do not sum to.

    >>> stage_of = layer_stages("model.layers", (1, 2))
    >>> stage_of("model.layers.2.mlp"), stage_of("model.norm")
    (1, None)
    """
    check_inner(counts)
    stage_of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
    if step is None and not (counts and counts[0] and counts[-1]):
        raise StrategyError(
            f"pipeline.layers: {list(counts)} leaves an end stage without layers, and nothing says which modules it "
            "has; give each end at least one layer"
        )
    if step is not None and (known := count_layers(step, layers)) != len(stage_of_layer):
        raise StrategyError(
            f"pipeline.layers: {list(counts)} places {len(stage_of_layer)} layers, and the model has {known} "
            f"({layers}); change the counts to sum to {known}, or leave pipeline.layers out"
        )
    number = _layer_number(layers)
    ends = {} if step is None else _ends(step, number, len(counts))

    def stage_of(module: str) -> int | None:
        layer = number(module)
        if layer is None:
            return ends.get(module)
        if layer >= len(stage_of_layer):
            raise StrategyError(
                f"pipeline.layers: {list(counts)} places {len(stage_of_layer)} layers, and the model has more: "
                f"{layers}.{layer}; change the counts, or leave pipeline.layers out"
            )
        return stage_of_layer[layer]

    return stage_of


def check_inner(counts: Sequence[int]) -> None:
    """Raise StrategyError where a stage between the ends has no layers, and so nothing to compute."""
    empty = [stage for stage, count in enumerate(counts[1:-1], 1) if not count]
    if empty:
        raise StrategyError(
            f"pipeline.layers: {list(counts)} leaves stage {empty[0]} without layers; only the first and the last "
            "stage compute anything without them (embedding; head and loss)"
        )


def count_layers(step: StepGraph, layers: str) -> int:
    """The number of layers of a list that the step computes. Raises StrategyError where there are none."""
    number = _layer_number(layers)
    found = max(
        (layer for node in step.nodes if (layer := number(node.meta["module"])) is not None), default=-1
    )
    if found < 0:
        raise StrategyError(
            f"a pipeline cuts the model between its layers, and no module of {layers!r} computes"
        )
    return found + 1


def balanced_counts(step: StepGraph, layers: str, stages: int, cost: NodeCost) -> tuple[int, ...]:
    """The number of layers of each of `stages` stages, so that the most expensive stage is as cheap as can be.

    What comes before and after the layers counts in the first and in the last stage, which alone may have no layers.
    Raises StrategyError for more stages than that allows.
    """
    found = layer_costs(step, layers, cost)
    return balanced_cut(
        found.layers, stages, before=found.before, after=found.after, least=found.least, name=layers
    )


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model's layers, and of what stands before and after them."""

    before: float
    layers: tuple[float, ...]
    after: float
    least: tuple[int, int]
    """The layers that the first and the last stage need to have anything to compute: 1 where an end has no node."""


def layer_costs(step: StepGraph, layers: str, cost: NodeCost) -> LayerCosts:
    """The costs of the layers of a list, each with what the data flow adds to it. Raises StrategyError without any."""
    total = count_layers(step, layers)
    # One label for each layer, one for what comes before them and one for what comes after.
    apart = layer_stages(layers, (0, *(1,) * total, 0), step)
    labels = label(step, apart, total + 2, check_writes=False).stage
    costs: list[list[float]] = [[] for _ in range(total + 2)]
    for node in step.nodes:
        if node in labels:
            costs[labels[node]].append(cost(node))
    before, *inner, after = map(math.fsum, costs)
    return LayerCosts(before, tuple(inner), after, (int(not costs[0]), int(not costs[-1])))


def balanced_cut(
    layers: Sequence[float],
    stages: int,
    *,
    before: float = 0.0,
    after: float = 0.0,
    least: tuple[int, int] = (0, 0),
    name: str = "its layers",
) -> tuple[int, ...]:
    """The counts of `balanced_counts` for layers of known costs.

    `before` and `after`: costs of what the first and the last stage have besides layers. `least`: the layers that these
    two stages have at least. Raises StrategyError where there are fewer layers than the stages need.

    >>> balanced_cut([1.0, 1.0, 1.0, 1.0], 2, after=1.5)
    (3, 1)
    """
    total = len(layers)
    most = total + 2 - sum(least)
    if stages > most:
        raise StrategyError(
            f"axes.pipeline · pipeline.virtual = {stages} stages, and the model has {total} layers ({name}), which can "
            f"be cut into at most {most} stages; make axes.pipeline or pipeline.virtual smaller"
        )
    problem = _Problem(_integers([before, after, *layers]), stages, least)
    return problem.most_even(problem.cheapest_maximum())


class _Problem:
    """The dynamic programs of one cut, over the first layer of each stage."""

    def __init__(self, costs: Sequence[int], stages: int, least: tuple[int, int]) -> None:
        """`costs`: of what comes before the layers, of what comes after them, and of the layers."""
        self._before, self._after, *layers = costs
        self._sums = list(accumulate(layers, initial=0))
        self._total, self._stages = len(layers), stages
        fewest = [least[0], *(1,) * (stages - 2), least[1]] if stages > 1 else [len(layers)]
        self._fewest = fewest
        self._later = list(accumulate(reversed(fewest[1:]), initial=0))[::-1]
        """Layers that the stages after each one have at least."""

    def cheapest_maximum(self) -> int:
        """The cost of the most expensive stage of the best cut."""
        best: list[int | None] = [None] * self._total + [0]
        for stage in reversed(range(self._stages)):
            best = [
                min(
                    (
                        max(cost, rest)
                        for end, cost in self._ends(stage, first)
                        if (rest := best[end]) is not None
                    ),
                    default=None,
                )
                for first in range(self._total + 1)
            ]
        assert best[0] is not None, "a cut was checked to exist"
        return best[0]

    def most_even(self, limit: int) -> tuple[int, ...]:
        """The cut, of those whose stages cost at most `limit`, with the smallest sum of squares, then counts."""
        best: list[tuple[int, tuple[int, ...]] | None] = [None] * self._total + [(0, ())]
        for stage in reversed(range(self._stages)):
            best = [
                min(
                    (
                        (cost * cost + rest[0], (end - first, *rest[1]))
                        for end, cost in self._ends(stage, first)
                        if cost <= limit and (rest := best[end]) is not None
                    ),
                    default=None,
                )
                for first in range(self._total + 1)
            ]
        assert best[0] is not None, "a cut was found to exist"
        return best[0][1]

    def _ends(self, stage: int, first: int) -> Iterator[tuple[int, int]]:
        """The ends that a stage may have from its first layer, and its cost with each."""
        fixed = self._before * (stage == 0) + self._after * (stage == self._stages - 1) - self._sums[first]
        for end in range(first + self._fewest[stage], self._total - self._later[stage] + 1):
            yield end, fixed + self._sums[end]


def flops_cost(step: StepGraph) -> NodeCost:
    """Costs of the nodes of a step and of its stages, where no device is known: FLOPs and bytes of their operators.

        cost = FLOPs + vector FLOPs + 10 · bytes that are read and written       bytes of a collective count twice

    It depends on shapes alone, so that all ranks have the same. Sizes that the data decide are those of even loads.
    """
    pricer = Pricer(step, balanced_sizes(step))

    def cost(node: fx.Node) -> float:
        work = pricer.cost(node)
        if work is None:
            return 0.0
        if isinstance(work, Collective):
            return 2.0 * FLOPS_PER_BYTE * work.bytes
        return work.flops + work.vector_flops + FLOPS_PER_BYTE * (work.read + work.written)

    return cost


def _layer_number(layers: str) -> Callable[[str], int | None]:
    """A module's name to the index of the layer that it is part of."""
    pattern = re.compile(rf"{re.escape(layers)}\.(\d+)(?:\.|$)")

    def number(module: str) -> int | None:
        found = pattern.match(module)
        return int(found[1]) if found else None

    return number


def _ends(step: StepGraph, number: Callable[[str], int | None], stages: int) -> Mapping[str, int]:
    """Modules outside of the layers that stand before the first or after the last one, with their stages."""
    sources = data_sources(step)
    forward = [node for node in step.nodes if region_of(node).phase != "backward"]
    inside = {node for node in forward if number(node.meta["module"]) is not None}
    behind: set[fx.Node] = set()
    ahead: set[fx.Node] = set()
    for node in forward:
        if any(source in inside or source in behind for source in sources[node]):
            behind.add(node)
    for node in reversed(forward):
        if node in inside or node in ahead:
            ahead |= sources[node]
    found: dict[str, set[tuple[bool, bool]]] = {}
    for node in forward:
        # What a weight alone decides stands beside the layers.
        if node not in inside and node.meta["module"] and (node in behind or node in ahead):
            found.setdefault(node.meta["module"], set()).add((node in behind, node in ahead))
    stage = {(False, True): 0, (True, False): stages - 1}
    return {
        module: stage[next(iter(places))]
        for module, places in found.items()
        if len(places) == 1 and next(iter(places)) in stage
    }


def _integers(costs: Sequence[float]) -> list[int]:
    """Floats, exactly, in the largest unit in which all of them are integers."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact]
