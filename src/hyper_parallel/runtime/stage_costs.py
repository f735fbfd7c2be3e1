"""Costs of pipeline stages, read off their graphs between the suspension points.

    forward    Σ cost of nodes up to the host point ``forward``
    input      … from there up to ``input``
    weight     … and after it                                              backward = input + weight
    saved      bytes alive at ``forward`` that are used after it           per micro-batch, without parameters
    released   saved − bytes alive at ``input`` that are used after it     below zero where recomputed values stay
    transfers  of border s: what stage s sends forward, or is sent back, whichever is more

A split backward pass costs no more than a whole one: values that are recomputed for the gradients of inputs stay until
those of the weights are computed, which is why `released` may be below zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import fx

from hyper_parallel.graph import balanced_sizes, lifetimes
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_cut import NodeCost
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.program.step_trace import PortMemory, StageMemory
from hyper_parallel.schedule import Costs
from hyper_parallel.trace.live_bytes import profile


def stage_costs(
    partition: Partition, cost: NodeCost, transfer: Callable[[float], float] | None = None
) -> Costs:
    """The costs of a partition's stages for one micro-batch, in the unit of `cost`; memory is in bytes of one rank.

    `transfer`: bytes that cross a border to the time that takes; nothing when left out.
    """
    times = [_times(stage, cost) for stage in partition.stages]
    memory = [stage_memory(stage) for stage in partition.stages]
    borders = [border_bytes(partition, border) for border in range(len(partition.stages) - 1)]
    return Costs(
        forward=tuple(forward for forward, _, _ in times),
        backward=tuple(before + after for _, before, after in times),
        input=tuple(before for _, before, _ in times),
        weight=tuple(after for _, _, after in times),
        transfers=tuple(transfer(count) for count in borders) if transfer is not None else (),
        saved=tuple(float(one.saved) for one in memory),
        released=tuple(float(one.saved - one.left) for one in memory),
    )


def parts_of(stage: Stage) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The nodes of a stage's forward pass, of its gradients of inputs and of its gradients of weights."""
    nodes = list(stage.step.nodes)
    forward, before = _point(nodes, HostPoint.FORWARD), _point(nodes, HostPoint.INPUT)
    return nodes[: forward + 1], nodes[forward + 1 : before + 1], nodes[before + 1 :]


def stage_memory(
    stage: Stage, sizes: Mapping[Any, int] | None = None, lasting: Collection[int] = ()
) -> StageMemory:
    """What a micro-batch holds in a stage.

    `sizes`: of what the data decide; those of even loads when left out. `lasting`: storages that are made once a step
    and stay, which are not the micro-batch's.
    """
    step = stage.step
    sizes = balanced_sizes(step) if sizes is None else sizes
    nodes = list(step.nodes)
    received = {one.name for one in stage.receives}
    ports = {storage for storage, entry in step.outside.items() if entry.name in received}
    used = {storage: at for at, node in enumerate(nodes) for storage in touched(node)}
    # From the node that makes it to the last one that uses it; what is received is there from the start.
    lives = [
        (0, used.get(life.storage, -1) + 1, life.bytes)
        if life.storage in ports
        else (life.born, min(life.died + 1, len(nodes)), life.bytes)
        for life in lifetimes(step, sizes)
        if life.storage not in lasting and (life.born >= 0 or life.storage in ports)
    ]
    alive = profile(lives, len(nodes))
    forward, before = _point(nodes, HostPoint.FORWARD), _point(nodes, HostPoint.INPUT)
    saved, left = (sum(size for born, end, size in lives if born <= at < end - 1) for at in (forward, before))
    parts = alive[: forward + 1], alive[forward + 1 : before + 1], alive[before + 1 :]
    peaks = tuple(max(part, default=0) for part in parts)
    return StageMemory(saved, left, (peaks[0], peaks[1], peaks[2]))


def port_memory(stage: Stage) -> dict[str, PortMemory]:
    """The memory of each value that a stage takes or gives, by the name of its crossing."""
    step, sizes = stage.step, balanced_sizes(stage.step)
    nodes = list(step.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    used = {storage: at for node, at in place.items() for storage in touched(node)}
    forward, before = _point(nodes, HostPoint.FORWARD), _point(nodes, HostPoint.INPUT)
    inputs = {entry.name: node for entry, node in zip(step.inputs, step.placeholders, strict=True)}
    answers = [node for node in nodes if node.target is HOST and node.args[0] == HostPoint.RECEIVE]
    values: dict[str, Any] = {one.name: inputs[one.name] for one in stage.receives}
    for crossings, shown in (
        (stage.sends, nodes[forward].args[1]),
        (stage.gradients_in, answers),
        (stage.gradients_out, nodes[before].args[1]),
    ):
        values |= {one.name: node for one, node in zip(crossings, shown, strict=False)}  # type: ignore[arg-type]
    found = {}
    for name, node in values.items():
        storage = next(iter(values_of(node))).storage
        at = max(used.get(storage, 0), place.get(node, 0))
        size = known(step.storages[storage].bytes, sizes)
        found[name] = PortMemory(storage, size, at, (at > forward) + (at > before))
    return found


def border_bytes(partition: Partition, border: int) -> int:
    """Bytes that one rank sends over the border between stages `border` and `border` + 1, in the busier direction.

    What goes further than to the neighbour leaves over the same links, and counts at the border that it leaves by.
    """
    stages = partition.stages
    ahead = sum_bytes(stages[border].sends)
    back = sum_bytes(one for stage in stages for one in stage.gradients_out if one.target == border)
    return max(ahead, back)


def sum_bytes(crossings: Iterable[Crossing]) -> int:
    """Bytes of values that cross, as they lie in memory."""
    return sum(span(one.value) * one.value.dtype.itemsize for one in crossings)


def _times(stage: Stage, cost: NodeCost) -> tuple[float, float, float]:
    forward, before, after = (sum(map(cost, nodes)) for nodes in parts_of(stage))
    return forward, before, after


def _point(nodes: list[fx.Node], point: HostPoint) -> int:
    return next(at for at, node in enumerate(nodes) if node.target is HOST and node.args[0] == point)
