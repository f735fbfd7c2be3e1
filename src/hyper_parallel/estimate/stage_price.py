"""Prices of a pipeline stage on a cluster: its tasks simulated operator by operator, once for all micro-batches.

forward   = end of the host point ``forward``            of the stage's simulated graph
input     = end of ``input`` − that
weight    = end of the graph − that + the sum into the gradients of the micro-batches before
            + what a framework computes again that no gradient needs  (`whole_recompute`, where the context says so)
update    = Σ seconds of clipping and of the optimizer, for the stage's parameters

A task is then one op of so many seconds in the step's Trace (`program.step_trace`), which allocates and frees what it
changes:

    F       what is saved, and while it runs what it needs beyond that       I      less `released` at its end
    W       frees the rest                                                   the first W: the gradients of its stage

besides the values that cross, which are freed where the stage uses them last, or by their transfer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.estimate.stage_capture import CapturedStages
from hyper_parallel.estimate.step_figures import Resident
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.costs import Pricer
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_cut import NodeCost
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.graph.step_context import current_step, region_of
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.overlap.merge_tasks import MergedTasks
from hyper_parallel.program.step_trace import PortMemory, PricedStage, StageMemory
from hyper_parallel.runtime.stage_costs import port_memory, stage_memory
from hyper_parallel.runtime.stage_ops import adding
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.step.micro_batch import WEIGHT
from hyper_parallel.step.pipeline_plan import hidden_matrix, merged_pairs, pairs_on_one_rank
from hyper_parallel.step.stage_plan import StagePair
from hyper_parallel.trace import Collective, Op, Timeline, Trace
from hyper_parallel.trace.timeline import step_parts


@dataclass(frozen=True)
class StagePrice:
    """Seconds and bytes of one stage on one rank."""

    forward: float
    input: float
    weight: float
    """Seconds of one micro-batch."""
    exposed: float
    """Of them, those in which only a collective of the stage's own mesh runs."""
    parts: Mapping[str, float]
    """Of them, by class of operators and collective (`trace.timeline`)."""
    update: float
    """Seconds of the update, once a step."""
    memory: StageMemory
    """Of one micro-batch."""
    resident: Resident
    """Parameters, gradients and optimizer state."""
    gathered: int
    """Bytes of weights that are gathered or cast once a step, and stay through it."""

    @property
    def micro_batch(self) -> float:
        """Seconds of a micro-batch."""
        return self.forward + self.input + self.weight


def node_seconds(step: StepGraph, cluster: Cluster, ranks: Sequence[int], algorithm: Algorithm) -> NodeCost:
    """A graph to the seconds of its nodes on a cluster, each alone. `ranks`: the global ranks of the mesh's places."""
    pricer = Pricer(step, balanced_sizes(step))
    costs = Costs(cluster, algorithm, len(ranks))

    def seconds(node: fx.Node) -> float:
        work = pricer.cost(node)
        if isinstance(work, Collective):
            here = tuple(ranks[place] for place in work.ranks)
            return costs.collective_seconds(replace(work, ranks=here))
        if work is None or work.kind == "view":
            return 0.0
        return costs.seconds(Op(0, "", work=work))

    return seconds


def price_stage(
    found: CapturedStages,
    stage: Stage,
    cluster: Cluster,
    ranks: Sequence[int],
    *,
    several: bool = True,
    algorithm: Algorithm = None,
    views: bool = False,
    fused: bool = False,
) -> StagePrice:
    """The prices of a captured stage on the device group of these global ranks.

    `several`: a step has more than one micro-batch, so that gradients are summed. `fused`: as of `graph.lower.lowered`.
    """
    step = stage.step
    timeline = _simulated(step, cluster, ranks, algorithm, views, fused)
    ends = {span.op.name: span.end for span in timeline.spans if span.op.name in (_FORWARD, _INPUT)}
    again = 0.0
    if current_step().recomputes_whole:
        ops = (span.op for span in timeline.spans)
        again = left_out_seconds(ops, Costs(cluster, algorithm, len(ranks)))
    return StagePrice(
        forward=ends[_FORWARD],
        input=ends[_INPUT] - ends[_FORWARD],
        weight=timeline.step - ends[_INPUT] + (_adding(step, cluster) if several else 0.0) + again,
        exposed=timeline.exposed,
        parts=step_parts(timeline),
        update=_update(found, stage, cluster, ranks, algorithm),
        memory=stage_memory(stage),
        resident=_resident(found, stage, several=several),
        gathered=gathered_bytes(step),
    )


_FORWARD, _INPUT = f"host {HostPoint.FORWARD.value}", f"host {HostPoint.INPUT.value}"
"""The names of the ops at which the forward pass and the INPUT half end."""


def _simulated(
    step: StepGraph, cluster: Cluster, ranks: Sequence[int], algorithm: Algorithm, views: bool, fused: bool
) -> Timeline:
    """One micro-batch of a stage."""
    found = lowered(step, sizes=balanced_sizes(step), views=views, fused=fused)
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    ops = tuple(placed(op, ranks, groups) for op in found.ops)
    trace = Trace({"stage": ops}, dict.fromkeys(ranks, "stage"), {"stage": found.resident})
    return simulate(trace, cluster, algorithm=algorithm, masking=False)


def placed(op: Op, ranks: Sequence[int], groups: dict[tuple[int, ...], tuple[int, ...]]) -> Op:
    """An op on the ranks of the device group. `groups`: known groups of places to their ranks."""
    if op.collective is None:
        return op
    places = op.collective.ranks
    if places not in groups:
        groups[places] = tuple(ranks[place] for place in places)
    return replace(op, collective=replace(op.collective, ranks=groups[places]))


def _adding(step: StepGraph, cluster: Cluster) -> float:
    """Seconds in which a micro-batch's gradients are added to those of the micro-batches before."""
    assert cluster.device is not None
    values = [value for node in _summed(step) for value in values_of(node)]
    return sum(cluster.device.seconds(adding(step, value)) for value in values)


def _summed(step: StepGraph) -> list[fx.Node]:
    """The nodes whose results are summed over micro-batches: gradients, before what reduces them once a step."""
    returned = step.returned.items()
    return list(dict.fromkeys(node for name, node in returned if name.startswith(GRADIENT)))


def gathered_bytes(step: StepGraph) -> int:
    """Bytes of the weights that a stage's micro-batches are given, gathered or cast once a step."""
    weights = {storage for storage, entry in step.outside.items() if entry.name.startswith(WEIGHT)}
    return _bytes(step, weights)


def _bytes(step: StepGraph, storages: set[int]) -> int:
    sizes = balanced_sizes(step)
    return sum(known(step.storages[storage].bytes, sizes) for storage in storages)


def _resident(found: CapturedStages, stage: Stage, *, several: bool) -> Resident:
    """What a rank keeps of the stage's parameters."""
    here = [found.resident[name] for name in found.parameters(stage) if name in found.resident]
    step = stage.step
    # Not those of the step that was captured whole, which are reduced: what micro-batches add to.
    summed = {value.storage for node in _summed(step) for value in values_of(node)} if several else set()
    return Resident(
        sum(one.parameter for one in here),
        _bytes(step, summed),
        sum(one.optimizer for one in here),
    )


def priced_stage(stage: Stage, price: StagePrice, ports: Mapping[str, str]) -> PricedStage:
    """A stage with its price. `ports`: to each name of what the captured stage, which may stand for others, takes and
    gives, the port; a stage may have fewer."""
    found = port_memory(stage)

    def of(crossings: Iterable[Crossing]) -> dict[str, PortMemory]:
        return {ports[one.name]: found[one.name] for one in crossings if one.name in ports}

    return PricedStage(
        (price.forward, price.input, price.weight),
        price.memory,
        price.resident.gradient,
        of(stage.receives),
        of(stage.sends),
        of(stage.gradients_in),
        of(stage.gradients_out),
    )


def _update(
    found: CapturedStages, stage: Stage, cluster: Cluster, ranks: Sequence[int], algorithm: Algorithm
) -> float:
    """Seconds of clipping and of the optimizer for the stage's parameters; what is of no parameter, in each stage."""
    step = found.update
    seconds = node_seconds(step, cluster, ranks, algorithm)
    mine = set(found.parameters(stage))
    of: dict[int, frozenset[str]] = {
        storage: frozenset({_parameter(entry.name)})
        for storage, entry in step.outside.items()
        if entry.kind in ("parameter", "optimizer")
    }
    of |= {storage: frozenset({name}) for storage, name in step.gradients.items()}
    total = 0.0
    for node in step.nodes:
        if region_of(node).phase not in ("clip", "optimizer"):
            continue
        names = Counter(
            name
            for source in node.all_input_nodes
            for value in values_of(source)
            for name in of.get(value.storage, ())
        )
        for value in values_of(node):
            of.setdefault(value.storage, frozenset(names) if len(names) == 1 else frozenset())
        share = 1.0 if not names else sum(name in mine for name in names) / len(names)
        if share:
            total += share * seconds(node)
    return total


def _parameter(name: str) -> str:
    """``optimizer.exp_avg.<name>`` and ``parameter.<name>`` to the name."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == "optimizer" else rest


# Prices of pairs of a pipeline's tasks on a cluster: the seconds that merging them hides.
#
# hidden[f][b] = seconds of the forward pass of stage f + gradients of inputs of stage b (whole backward pass, if first)
#              − seconds of both, merged                                          (`overlap.merge_tasks`)
#
# with every collective alone on its link, and the least of all places of device groups.


def hidden_seconds(
    found: CapturedStages,
    cluster: Cluster,
    places: Sequence[DeviceGroup],
    ranks: int,
    algorithm: Algorithm = None,
) -> tuple[tuple[float, ...], ...]:
    """[forward stage][backward stage] of all stages, as `schedule.Costs` takes it. `places`: the device groups that lie
    differently on the links; `ranks`: of the schedule."""
    assert cluster.device is not None, "a cluster that prices has a device"
    slowdown = cluster.device.comm_slowdown
    wanted = pairs_on_one_rank(found.stages, ranks)
    different = sorted({(found.captured[one], found.captured[other]) for one, other in wanted})
    stages = found.partition.stages
    by_place = [
        merged_pairs(
            stages,
            [node_seconds(stage.step, cluster, group.ranks, algorithm) for stage in stages],
            different,
            slowdown,
        )
        for group in places
    ]
    least: dict[StagePair, MergedTasks] = {
        pair: min((one[pair] for one in by_place), key=lambda merged: merged.hidden) for pair in different
    }
    return hidden_matrix(
        found.stages, {(f, b): least[found.captured[f], found.captured[b]] for f, b in wanted}
    )


# Recomputation of whole layers: seconds of what this project's graphs leave out when they compute a layer again.
#
# A graph computes again only what the backward pass needs (`graph.recompute`): not a layer's last product, and not the
# collective behind it. A checkpoint that calls the layer's function again runs all of it, as Megatron's
# `CheckpointFunction` and PyTorch's checkpoint with reentry do. The difference, for each layer that is computed again:
#
#     Σ seconds of its products, attention and collectives in the forward pass − Σ of those that are computed again
#
# Operators bound by memory are left out: few are not computed again.

_LAYER = re.compile(r"^(.*?\.\d+)(?=\.|$)")
_KINDS = ("matmul", "attention")


def left_out_seconds(ops: Iterable[Op], costs: Costs) -> float:
    """Seconds of a class's ops, of which some may be computed again."""
    once: dict[str, float] = {}
    again: dict[str, float] = {}
    for op in ops:
        layer = _LAYER.match(op.module)
        if layer is None or not (op.recomputed or op.phase == "forward"):
            continue
        if op.collective is None and (op.work is None or op.work.kind not in _KINDS):
            continue
        seconds = costs.collective_seconds(op.collective) if op.collective else costs.seconds(op)
        into = again if op.recomputed else once
        into[layer[1]] = into.get(layer[1], 0.0) + seconds
    return sum(max(0.0, once.get(layer, 0.0) - seconds) for layer, seconds in again.items())
