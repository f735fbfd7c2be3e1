"""Orders of a graph's nodes that hold fewer bytes, or for a shorter time; the bits are the same.

`collectives_in_place` moves gathers of weights to their first use, and reductions of gradients to where these are
complete: a model whose weights are all gathered when it is called has all gathers first in its graph and all reductions
last, so that every weight would be there for the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import fx

from hyper_parallel.graph.dependencies import dependencies, later, reorder
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.host_nodes import HOST, is_update
from hyper_parallel.graph.ir import StepGraph, is_collective, is_wait, values_of
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import draws_random, touched, writes
from hyper_parallel.graph.step_context import region_of


def collectives_in_place(step: StepGraph) -> StepGraph:
    """The same step in another order, which ranks share that compute with the same weights."""
    gathers = _gathers(step)
    reordered = reorder(step, later(step, gathers), [node for node in step.nodes if is_collective(node)])
    moved = {node.name for node in gathers}
    place = {node: at for at, node in enumerate(reordered.nodes)}
    for node in reversed(list(reordered.nodes)):
        users = [user for user in node.users if user.op == "call_function"]
        if node.name in moved and users:
            node.meta["module"] = min(users, key=lambda user: place[user]).meta["module"]
        elif node.name in moved and not node.users:
            reordered.graph.erase_node(node)  # of a weight that nothing uses
    return _reduced_at_once(reordered, list(reordered.nodes))


def _gathers(step: StepGraph) -> list[fx.Node]:
    """Nodes that gather weights, from parameters alone and before the model's code."""
    nodes = [node for node in step.nodes if node.meta["module"] == ""]
    known = of_weights(step, list(step.nodes)) | set(step.outside)
    return [
        node for node in nodes if _pure(node) and all(value.storage in known for value in values_of(node))
    ]


def _reduced_at_once(step: StepGraph, nodes: list[fx.Node]) -> StepGraph:
    """Return the step with the reductions of gradients of the root's backward pass as early as they can be."""
    root = [
        node
        for node in nodes
        if node.meta["module"] == "" and region_of(node).phase == "backward" and _pure(node)
    ]
    found = {node for node in root if is_collective(node)}
    for node in reversed(root):
        if any(user in found for user in node.users):
            found.add(node)
    for node in root:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    free = [node for node in nodes if is_collective(node)]
    needs = dependencies(step, free)
    places: dict[fx.Node, tuple[int, ...]] = {}
    for at, node in enumerate(nodes):
        after = max((places[other] for other in needs[node]), default=(-1,))
        places[node] = (*after, at) if node in found else (at,)
    return reorder(step, sorted(nodes, key=lambda node: places[node]), free, needs)


def _pure(node: fx.Node) -> bool:
    return is_wait(node) or not (writes(node) or draws_random(node))


# Clusters uses of the same storage, which lengthens idle intervals for offloading.
#
# - A few numbers that are made of much (the square sum of a gradient, for the norm of all) are made as soon as that is
#   there. Else all of it must be there again at the step's end.
# - What changes memory in place for an update (a gradient's clipping) comes right before that update, not all of it
#   before all updates.
# - Updates stand in the order of the model, or from its end to its beginning. Those on the host stay where they are.
#
# `graph.dependencies.dependencies` holds: no two writes to the same memory change places, and collectives, waits for
# them and host points stay in their order. So the bits are the same.

FEW = 1 / 64
"""Share of the bytes that are read up to which a result counts as few numbers."""


def sums_at_birth(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> StepGraph:
    """The step with few numbers that are made of much as early as can be; `sizes` gives the symbols values."""
    needs = dependencies(step)
    return reorder(step, sums_first(step, needs, sizes), needs=needs)


def sums_first(
    step: StepGraph, needs: Mapping[fx.Node, Collection[fx.Node]], sizes: Mapping[Any, int] | None = None
) -> list[fx.Node]:
    """The order of `sums_at_birth`. `needs`: the step's dependencies."""
    group_of = _groups(step, [known(storage.bytes, dict(sizes or {})) for storage in step.storages])
    members: dict[fx.Node, list[fx.Node]] = {}
    missing: dict[fx.Node, set[fx.Node]] = {}
    """Of each group, by its last node: what it still waits for."""
    for node in step.nodes:
        if node in group_of:
            last = group_of[node]
            members.setdefault(last, []).append(node)
            missing.setdefault(last, set()).update(o for o in needs[node] if group_of.get(o) is not last)
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for last, others in missing.items():
        for other in others:
            waiting.setdefault(other, []).append(last)
    order: list[fx.Node] = []
    pending = [members[last] for last, others in missing.items() if not others]
    for node in step.nodes:
        pending += [] if node in group_of else [[node]]
        while pending:
            run = pending.pop(0)
            order += run
            for done in run:
                for last in waiting.get(done, ()):
                    missing[last].discard(done)
                    if not missing[last]:
                        pending.append(members[last])
    return order


def _groups(step: StepGraph, bytes_of: list[int]) -> dict[fx.Node, fx.Node]:
    """Nodes that make few numbers of much, and those that compute for them alone, to the last one of their group."""
    found: dict[fx.Node, fx.Node] = {}
    for node in step.nodes:
        allocated = sum(bytes_of[storage] for storage in _fresh(node))
        if not allocated or _stays(node):
            continue
        group, pending = {node}, [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source.op != "call_function" or source in found or _stays(source):
                    continue
                if source.users.keys() <= group:
                    group.add(source)
                    pending.append(source)
        inside = set().union(*map(_fresh, group))
        if allocated <= FEW * sum(
            bytes_of[storage] for storage in set().union(*map(touched, group)) - inside
        ):
            found.update(dict.fromkeys(group, node))
    return found


def updates_together(step: StepGraph, *, backwards: bool = False) -> StepGraph:
    """The step with what each update needs right before it; `backwards`: the last update comes first."""
    needs = dependencies(step)
    return reorder(step, _by_updates(step, list(step.nodes), needs, backwards), needs=needs)


def cluster_uses(
    step: StepGraph, sizes: Mapping[Any, int] | None = None, *, backwards: bool = False
) -> StepGraph:
    """`updates_together` of `sums_at_birth`. A legal order leaves the dependencies as they are: they are found once."""
    needs = dependencies(step)
    return reorder(step, _by_updates(step, sums_first(step, needs, sizes), needs, backwards), needs=needs)


def _by_updates(
    step: StepGraph, nodes: list[fx.Node], needs: Mapping[fx.Node, Collection[fx.Node]], backwards: bool
) -> list[fx.Node]:
    """The order of `updates_together` of a step whose nodes run in this one."""
    lasting = {storage.index for storage in step.storages if storage.name is not None}
    updates = [
        node
        for node in nodes
        if region_of(node).phase == "optimizer" and writes(node) & lasting and not is_update(node)
    ]
    lazy = {
        node
        for node in nodes
        if not _fixed(node)
        and (region_of(node).phase == "optimizer" or (region_of(node).phase == "clip" and not _fresh(node)))
    }
    anchors = [node for node in nodes if node not in lazy]
    if backwards:
        updates.reverse()
    return _on_demand([*anchors, *updates, *nodes], needs)


def _on_demand(wanted: Iterable[fx.Node], needs: Mapping[fx.Node, Collection[fx.Node]]) -> list[fx.Node]:
    """Nodes in an order that is wanted, each with what it needs and what is not there yet right before it."""
    order: dict[fx.Node, None] = {}
    for root in wanted:
        pending = [root]
        while pending:
            missing = [other for other in needs[pending[-1]] if other not in order]
            if missing:
                pending += sorted(missing, key=lambda node: node.name)
            else:
                order[pending.pop()] = None
    return list(order)


def _stays(node: fx.Node) -> bool:
    """Whether a node is no part of sums that may go elsewhere."""
    return _fixed(node) or draws_random(node) or bool(writes(node))


def _fixed(node: fx.Node) -> bool:
    return node.target is HOST or is_collective(node) or is_wait(node) or is_update(node)


def _fresh(node: fx.Node) -> set[int]:
    """Storages that a node brings to life."""
    return {value.storage for value in values_of(node)} - touched(node)
