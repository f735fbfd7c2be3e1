"""Topological order by priority."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from hyper_parallel.errors import GraphError


def priority_order(
    nodes: Sequence[fx.Node],
    needs: Mapping[fx.Node, set[fx.Node]],
    wish: Mapping[fx.Node, Any] | None = None,
) -> list[fx.Node]:
    """`nodes` after what each needs, and otherwise in the order of `wish`: (place, then), or as they stand.

    A wish is compared with the places of the others, so that (4.5, 0) is between the nodes 4 and 5. Raises GraphError
    when nodes need each other.
    """
    wish = wish or {}
    place = {node: wish.get(node, (float(at), at)) for at, node in enumerate(nodes)}
    number = {node: at for at, node in enumerate(nodes)}
    left = {node: len(needs[node]) for node in nodes}
    then: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for other in needs[node]:
            then[other].append(node)
    ready = [(place[node], number[node], node) for node in nodes if not left[node]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for other in then[node]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (place[other], number[other], other))
    if len(order) < len(nodes):
        stuck = next(node for node in nodes if left[node])
        raise GraphError(
            f"{stuck} ({stuck.target}) and {len(nodes) - len(order) - 1} more nodes need each other"
        )
    return order
