"""Prices of a pipeline stage on a cluster: its tasks simulated operator by operator, once for all micro-batches.

forward   = end of the host point ``forward``            of the stage's simulated graph, without what runs once a
input     = end of ``input`` − that                       step (`graph.once_a_step`)
weight    = end of the graph − that + the sum into the gradients of the micro-batches before
gather    = Σ seconds of what runs before the first micro-batch
reduce    = Σ seconds of what runs after the last one
update    = Σ seconds of clipping and of the optimizer, for the stage's parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.stage_capture import CapturedStages
from hyper_parallel.estimate.step_figures import Resident
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.costs import Pricer
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.gradient_sums import GRADIENT
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.once_a_step import OnceAStep, once_a_step
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.stage_cut import NodeCost
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.graph.suspension import HostPoint
from hyper_parallel.runtime.stage_costs import StageMemory, stage_memory
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.strategy.memory import ShardLevel
from hyper_parallel.trace import Collective, Op, Timeline, Trace
from hyper_parallel.workload.work import Work


@dataclass(frozen=True)
class StagePrice:
    """Seconds and bytes of one stage on one rank."""

    forward: float
    input: float
    weight: float
    """Seconds of one micro-batch."""
    exposed: float
    """Of them, those in which only a collective of the stage's own mesh runs."""
    gather: float
    reduce: float
    update: float
    """Seconds once a step."""
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


def node_seconds(step: StepGraph, cluster: Cluster, ranks: Sequence[int], algorithm: str | None) -> NodeCost:
    """A graph to the seconds of its nodes on a cluster, each alone. `ranks`: the global ranks of the mesh's places."""
    pricer = Pricer(step, balanced_sizes(step))
    costs = Costs(cluster, algorithm, len(ranks))

    def seconds(node: fx.Node) -> float:
        work = pricer.cost(node)
        if isinstance(work, Collective):
            here = tuple(ranks[place] for place in work.ranks)
            return cluster.collective_seconds(work.kind, work.bytes, here, algorithm)
        if work is None or work.kind == "view":
            return 0.0
        return costs.seconds(Op(0, "", work=work))

    return seconds


def price_stage(
    found: CapturedStages,
    stage: Stage,
    cluster: Cluster,
    ranks: Sequence[int],
    level: ShardLevel,
    *,
    several: bool = True,
    algorithm: str | None = None,
    views: bool = False,
) -> StagePrice:
    """The prices of a captured stage on the device group of these global ranks.

    `several`: a step has more than one micro-batch, so that gradients are summed.
    """
    step = stage.step
    once = once_a_step(step, level, found.storages)
    timeline = _simulated(step, once, cluster, ranks, algorithm, views)
    ends = {span.op.name: span.end for span in timeline.spans if span.op.name in (_FORWARD, _INPUT)}
    seconds = node_seconds(step, cluster, ranks, algorithm)
    return StagePrice(
        forward=ends[_FORWARD],
        input=ends[_INPUT] - ends[_FORWARD],
        weight=timeline.step - ends[_INPUT] + (_adding(step, once, cluster) if several else 0.0),
        exposed=timeline.exposed,
        gather=sum(map(seconds, once.before)),
        reduce=sum(map(seconds, once.after)),
        update=_update(found, stage, cluster, ranks, algorithm),
        memory=stage_memory(stage, lasting=once.lasting(step)),
        resident=_resident(found, stage, once, several=several),
        gathered=_bytes(step, _kept_weights(step, once)),
    )


_FORWARD, _INPUT = f"host {HostPoint.FORWARD.value}", f"host {HostPoint.INPUT.value}"
"""The names of the ops at which the forward pass and the INPUT half end."""


def _simulated(
    step: StepGraph,
    once: OnceAStep,
    cluster: Cluster,
    ranks: Sequence[int],
    algorithm: str | None,
    views: bool,
) -> Timeline:
    """One micro-batch of a stage, in which what runs once a step takes no time."""
    found = lowered(step, sizes=balanced_sizes(step), views=views)
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    ops = tuple(
        _placed(op, node, once, ranks, groups) for op, node in zip(found.ops, found.nodes, strict=True)
    )
    trace = Trace({"stage": ops}, dict.fromkeys(ranks, "stage"), {"stage": found.resident})
    return simulate(trace, cluster, algorithm=algorithm, masking=False)


def _placed(
    op: Op,
    node: fx.Node,
    once: OnceAStep,
    ranks: Sequence[int],
    groups: dict[tuple[int, ...], tuple[int, ...]],
) -> Op:
    """An op on the ranks of the device group. `groups`: known groups of places to their ranks."""
    if node in once.before or node in once.after:
        return replace(op, work=None, collective=None, queue="compute")
    if op.collective is None:
        return op
    places = op.collective.ranks
    if places not in groups:
        groups[places] = tuple(ranks[place] for place in places)
    return replace(op, collective=replace(op.collective, ranks=groups[places]))


def _adding(step: StepGraph, once: OnceAStep, cluster: Cluster) -> float:
    """Seconds in which a micro-batch's gradients are added to those of the micro-batches before."""
    assert cluster.device is not None
    total = 0.0
    for node in _accumulated(step, once):
        for value in values_of(node):
            size = known(value.bytes, balanced_sizes(step))
            work = Work(
                "elementwise",
                vector_flops=size / value.dtype.itemsize,
                read=2 * size,
                written=size,
                dtype=str(value.dtype).removeprefix("torch."),
                op="aten.add_.Tensor",
            )
            total += cluster.device.seconds(work)
    return total


def _accumulated(step: StepGraph, once: OnceAStep) -> list[fx.Node]:
    """The nodes whose results are summed over micro-batches: gradients, before what reduces them once a step."""
    nodes: dict[fx.Node, None] = {}
    for name, node in step.returned.items():
        if name.startswith(GRADIENT):
            left = [node]
            while left:
                one = left.pop()
                if one in once.after:
                    left += [
                        source for source in one.all_input_nodes if region_of(source).phase == "backward"
                    ]
                elif one.op == "call_function":
                    nodes[one] = None
    return list(nodes)


def _kept_weights(step: StepGraph, once: OnceAStep) -> set[int]:
    """Storages that are gathered once a step and used by micro-batches."""
    made = {value.storage for node in once.before for value in values_of(node)} - set(step.outside)
    used = {
        value.storage
        for node in step.nodes
        if node not in once.before
        for source in node.all_input_nodes
        for value in values_of(source)
    }
    return made & used


def _bytes(step: StepGraph, storages: set[int]) -> int:
    sizes = balanced_sizes(step)
    return sum(known(step.storages[storage].bytes, sizes) for storage in storages)


def _resident(found: CapturedStages, stage: Stage, once: OnceAStep, *, several: bool) -> Resident:
    """What a rank keeps of the stage's parameters."""
    names = _parameters(stage)
    here = [found.resident[name] for name in names if name in found.resident]
    step = stage.step
    # Not those of the step that was captured whole, which are reduced: what micro-batches add to.
    summed = (
        {value.storage for node in _accumulated(step, once) for value in values_of(node)}
        if several
        else set()
    )
    return Resident(
        sum(one.parameter for one in here),
        _bytes(step, summed),
        sum(one.optimizer for one in here),
    )


def _parameters(stage: Stage) -> list[str]:
    return [one.name.partition(".")[2] for one in stage.step.inputs if one.kind == "parameter"]


def _update(
    found: CapturedStages, stage: Stage, cluster: Cluster, ranks: Sequence[int], algorithm: str | None
) -> float:
    """Seconds of clipping and of the optimizer for the stage's parameters; what is of no parameter, in each stage."""
    step = found.update
    seconds = node_seconds(step, cluster, ranks, algorithm)
    mine = set(_parameters(stage))
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
