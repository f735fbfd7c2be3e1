"""Early free: schedules nodes that release more memory than they allocate as early as possible.

A node's gain is the bytes of the storages that it is the last to use and that nothing else needs from its new place on,
less the bytes that it brings to life: sums over a temporary, an in-place addition of a gradient, a cast to fewer bits.
Views cost nothing and go up too, so that they hold nothing back. Collectives and host points stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.dependencies import dependencies, reorder
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.liveness import peak
from hyper_parallel.graph.memory_effects import is_view, touched
from hyper_parallel.graph.suspension import HOST


def early_free(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> StepGraph:
    """The same step, with a peak that is lower or the same. `sizes` gives the symbols values."""
    made = reorder(step, _order(step, dict(sizes or {})))
    return made if peak(made, sizes).bytes <= peak(step, sizes).bytes else step.copy()


def _order(step: StepGraph, sizes: dict[Any, int]) -> list[fx.Node]:
    nodes = list(step.nodes)
    users: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for storage in touched(node) | {value.storage for value in values_of(node)}:
            users.setdefault(storage, []).append(node)
    lasting = {storage.index for storage in step.storages if storage.name is not None}
    lasting |= {value.storage for node in step.output.all_input_nodes for value in values_of(node)}
    bytes_of = [known(storage.bytes, sizes) for storage in step.storages]
    # A place is a tuple, so that there is always another one right behind it: (3,) < (3, 1) < (4,).
    places: dict[fx.Node, tuple[int, ...]] = {}
    needs = dependencies(step)
    for at, node in enumerate(nodes):
        places[node] = (at,)
        if node.target is HOST or is_collective(node) or is_wait(node):
            continue
        after = max((places[other] for other in needs[node]), default=(-1,))
        old = touched(node)
        freed = sum(
            bytes_of[storage]
            for storage in old - lasting
            if users[storage][-1] is node and all(places[user] <= after for user in users[storage][:-1])
        )
        born = sum(bytes_of[storage] for storage in {value.storage for value in values_of(node)} - old)
        if is_view(node) or freed > born:
            places[node] = (*after, at)
    return sorted(nodes, key=lambda node: places[node])
