"""Finds non-finite gradients within a memory budget.

Where a step is found to be unusable its gradients may be elsewhere, or gone. So the step is run again, up to where that
was found, and the host looks at each gradient while it is there: right behind the last node that has to do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.suspension import HOST, HostPoint
from hyper_parallel.graph.tier_ops import is_cache
from hyper_parallel.offloading import Runtime
from hyper_parallel.step.graph_cache import RunsStep
from hyper_parallel.step.nonfinite_report import counted
from hyper_parallel.step.recipe import CONTROL_VECTOR


def gradients_counted(
    step: StepGraph,
    runtime: Runtime,
    state: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    runs: Callable[[StepGraph], RunsStep],
) -> dict[str, Tensor]:
    """What `guard.counted` says of each gradient, by the name of its parameter. The collectives are the step's. `runs`:
    what runs a graph that was made of the step.

    `state` of what the step is `given` was not changed since the step began, and rests where it wants it afterwards.
    """
    found: dict[str, Tensor] = {}
    looked, names = looking(step)
    left = iter(names)

    def host(point: HostPoint, values: Sequence[Tensor]) -> Tensor | None:
        if point is HostPoint.LOAD:
            return torch.zeros(CONTROL_VECTOR, device=values[0].device)
        if point is HostPoint.CHECK:
            raise _Seen
        if point is HostPoint.LOOK:
            found[next(left)] = counted(values[0])
        return None

    runtime.stopped(state)
    try:
        runs(looked).run(given, host)
    except _Seen:
        runtime.stopped(state)
    return found


class _Seen(Exception):
    """Ends the second run of a step."""


def looking(step: StepGraph) -> tuple[StepGraph, list[str]]:
    """The step with a point for each gradient at which the host is shown it, before the host is shown the norm; and
    the names of the gradients in the order of these points."""
    made = step.copy()
    names: dict[fx.Node, str] = {}
    seen: set[int] = set()
    checked = False
    for node in reversed(list(made.nodes)):
        if node.target is HOST and node.args[0] == HostPoint.CHECK:
            checked = True
        if not checked or is_cache(node):
            continue
        made_here = {value.storage for value in values_of(node)}
        for storage in sorted((touched(node) | made_here) & (made.gradients.keys() - seen)):
            shown = _whole(node, storage)
            if shown is not None:
                seen.add(storage)
                with made.graph.inserting_after(node):
                    look = made.graph.call_function(HOST, (HostPoint.LOOK.value, [shown], 0))
                names[look] = made.gradients[storage]
                look.meta = {key: node.meta[key] for key in ("region", "module", "recomputed")}
    return made, [names[node] for node in made.nodes if node in names]


def _whole(node: fx.Node, storage: int) -> fx.Node | None:
    """The largest value in a storage that a node is given or gives; None where that is one of several."""
    found = [
        (max(value.elements for value in values), other)
        for other in (node, *node.all_input_nodes)
        if len(values := list(values_of(other))) == 1 and values[0].storage == storage
    ]
    return max(found, key=lambda one: one[0])[1] if found else None
