"""Collectives that serve parameters: weight gathers and gradient reductions.

A weight is gathered before it is used, and nothing but parameters goes into that, so that a gather may begin at any
time. A gradient is reduced, and nothing but the update needs the result, so that it may be waited for late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from hyper_parallel.compat.dispatch import once_each
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.collective_groups import group_name, is_collective, is_wait
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import begun, is_view, storages_of, writes
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.suspension import HOST


@dataclass(frozen=True)
class Run:
    """Gathers that stand together: those of a layer, as a rule."""

    asks: tuple[fx.Node, ...]
    """What comes before them and their beginnings: casts, views, collectives."""
    gathers: tuple[fx.Node, ...]
    """The collectives among `asks`."""
    waits: tuple[fx.Node, ...]


def runs(step: StepGraph) -> list[Run]:
    """The gathers of weights, in order; nothing is computed from anything but weights between those of one run."""
    nodes = list(step.nodes)
    weights = of_weights(step, nodes)
    found: list[Run] = []
    asks: dict[fx.Node, None] = {}
    later: set[fx.Node] = set()
    waits: list[fx.Node] = []

    def close() -> None:
        gathers = tuple(node for node in asks if is_collective(node))
        if gathers:
            found.append(Run(tuple(asks), gathers, tuple(waits)))
        asks.clear()
        waits.clear()
        later.clear()

    for node in nodes:
        if not _made_of(node, weights):
            if not is_view(node):
                close()
        elif is_wait(node) and begun(node) in asks:
            waits.append(node)
            later.add(node)
        elif later.intersection(node.all_input_nodes):
            later.add(node)
        else:
            asks[node] = None
    close()
    return found


def reductions(step: StepGraph) -> list[fx.Node]:
    """The collectives of the backward pass whose results no product of it needs, in order."""
    needed: set[fx.Node] = set()
    for node in reversed(list(step.nodes)):
        if region_of(node).phase not in ("forward", "loss", "backward"):
            continue
        if _multiplies(node.target) or any(user in needed for user in node.users):
            needed.add(node)
    return [
        node
        for node in step.nodes
        if _is_reduction(node) and region_of(node).phase == "backward" and node not in needed
    ]


def kind_of(node: fx.Node) -> tuple[object, ...]:
    """What two collectives must share to be made one: operator, group, other arguments, dtype, pass and micro-batch."""
    (value,) = values_of(node)
    return (
        node.target,
        group_name(node),
        *(arg for arg in node.args if not isinstance(arg, fx.Node)),
        value.dtype,
        region_of(node).phase,
        node.meta["recomputed"],
    )


def _made_of(node: fx.Node, weights: set[int]) -> bool:
    made = storages_of([node])
    return (
        bool(made)
        and made <= weights
        and not (writes(node) and not is_wait(node))
        and node.target is not HOST
    )


def _is_reduction(node: fx.Node) -> bool:
    return is_collective(node) and _reduces(node.target)


@once_each
def _reduces(target: Any) -> bool:
    return "reduce" in str(target)


@once_each
def _multiplies(target: Any) -> bool:
    return any(part in str(target) for part in ("mm", "bmm", "addmm", "attention", "conv"))
