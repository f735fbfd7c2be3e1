"""The order in which parts of a model give values to one another, from the data flow of its forward pass."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence

from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.data_flow import data_sources
from hyper_parallel.graph.ir import StepGraph
from hyper_parallel.graph.partition import StageOf, repeatable
from hyper_parallel.graph.regions import region_of


def part_order(step: StepGraph, part_of: StageOf, names: Sequence[str]) -> list[int]:
    """The parts that compute anything, each behind those whose values it uses; of several orders the one nearest to
    that of `names`.

    Raises GraphError where two parts need each other's values.
    """
    sources = data_sources(step)
    repeated = repeatable(step, sources)
    reached: dict[fx.Node, frozenset[int]] = {}
    """Of each forward node: its part, or, of one between parts, those whose values it has."""
    before: dict[int, set[int]] = {}
    for node in step.nodes:
        if region_of(node).phase == "backward" or node in repeated:
            continue
        given = frozenset[int]().union(*(reached.get(source, frozenset()) for source in sources[node]))
        part = part_of(node.meta["module"])
        reached[node] = given if part is None else frozenset({part})
        if part is not None:
            before.setdefault(part, set()).update(given - {part})
    sorter = graphlib.TopologicalSorter(before)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = [names[part] for part in error.args[1]]
        raise GraphError(
            f"{' and '.join(sorted(set(cycle)))} need each other's values in the forward pass; put what joins them in "
            "one submodel"
        ) from None
    found: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        found.append(ready.pop(0))
        sorter.done(found[-1])
    return found
