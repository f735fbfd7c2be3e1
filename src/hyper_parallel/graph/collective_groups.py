"""Process groups of a graph's collectives: their ranks and mesh axis.

A graph names a group as the runtime does, which says nothing to a reader. `capture` takes no Strategy, so whoever made
the groups tells it which name means what (`shard.process_mesh.ProcessMesh.process_groups`).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import fx

from hyper_parallel.compat.dispatch import once_each
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph.ir import CollectiveGroup, StepGraph

_ARGUMENT = "group_name"


def is_collective(node: fx.Node) -> bool:
    """Whether a node begins a collective. Waiting for one is another node (`is_wait`)."""
    return _role(node.target) == "begins"


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits until a collective is done."""
    return _role(node.target) == "waits"


def group_of(step: StepGraph, node: fx.Node) -> CollectiveGroup:
    """The group of a node that begins a collective, or that waits for one.

    Raises CaptureError when the step was captured without being told of that group.
    """
    while is_wait(node):
        (begun,) = node.args
        assert isinstance(begun, fx.Node)
        node = begun
    name = group_name(node)
    found = step.groups.get(name)
    if found is None:
        told = ", ".join(sorted(step.groups)) or "none"
        raise CaptureError(
            f"the graph's {node.target} is over the process group {name!r}, of which the capture was not told "
            f"(told of: {told}); give `capture` the axis and the ranks of each group in `groups`"
        )
    return found


def group_name(node: fx.Node) -> str:
    """The name of the process group of a node that begins a collective."""
    assert is_collective(node), f"{node.target} begins no collective"
    return str(
        node.kwargs[_ARGUMENT] if _ARGUMENT in node.kwargs else node.args[_place_of_group(node.target)]
    )


def ranks_of(step: StepGraph) -> list[int]:
    """The global ranks that the step's collectives join, ascending; rank 0 where there are none."""
    return sorted({rank for group in step.groups.values() for rank in group.ranks} | {0})


@once_each
def _role(target: Any) -> Literal["begins", "waits", ""]:
    """What an operator does for a collective."""
    if getattr(target, "namespace", "") != "_c10d_functional":
        return ""
    return "waits" if "wait" in str(target) else "begins"


@once_each
def _place_of_group(target: Any) -> int:
    """Which argument of a collective is its group."""
    return next(i for i, argument in enumerate(target._schema.arguments) if argument.name == _ARGUMENT)
