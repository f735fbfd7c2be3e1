"""The Trace of a pipeline's step: the Program of its schedule, expanded, with what runs once a step around it.

    gather (once)  ·  the instruction list  ·  reduce (once)  ·  norm over all groups  ·  update (once)

A task is one op of as many seconds as its stage was priced at, collectives of its own mesh included. Gathers and
reductions have all their operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.stage_capture import CapturedStages
from hyper_parallel.estimate.stage_price import GRADIENTS, StagePrice, placed, task_ops
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.lower import lowered
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program import GroupOps, TaskKind, TaskOps, expand
from hyper_parallel.program.expand import AXIS
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.stage_costs import sum_bytes
from hyper_parallel.schedule import Costs, Schedule
from hyper_parallel.trace import Bytes, Collective, Kind, Op, Trace
from hyper_parallel.workload import Work

_NORM_BYTES = 64
"""Of the sum over all ranks that a step ends with: the norm, the loss and what else is told."""


def pipeline_trace(
    found: CapturedStages,
    prices: Sequence[StagePrice],
    costs: Costs,
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    cluster: Cluster,
    views: bool,
    fused: bool,
) -> Trace:
    """The Trace of the schedule's Program."""
    partition, names = found.all_stages()
    captured = [found.partition.stages[place] for place in found.captured]
    stages = {
        number: task_ops(stage, price, number, ports)
        for number, (stage, price, ports) in enumerate(zip(captured, prices, names, strict=True))
    }

    def once(step: StepGraph | None, phase: str, ranks: Sequence[int]) -> Iterator[TaskOps]:
        if step is not None:
            known: dict[tuple[int, ...], tuple[int, ...]] = {}
            ops = lowered(step, sizes=balanced_sizes(step), views=views, fused=fused).ops
            yield TaskOps(tuple(replace(placed(op, ranks, known), phase=phase) for op in ops))

    besides = {}
    for place, group in enumerate(groups):
        mine = [number for number, home in enumerate(schedule.placement) if home == place]
        graphs = [found.once(captured[number]) for number in mine]
        besides[group.name] = GroupOps(
            resident=tuple(held for number in mine for held in _state(prices[number], number)),
            before=tuple(task for gather, _ in graphs for task in once(gather, "gather", group.ranks)),
            after=(
                *(task for _, reduce in graphs for task in once(reduce, "reduce", group.ranks)),
                *_shared(found, schedule, groups, cluster, place),
                _update(prices, mine, tuple(rank for one in groups for rank in one.ranks)),
            ),
        )
    return expand(
        pipeline_program(partition, schedule, groups),
        stages,
        besides,
        sizes={one.name: sum_bytes([one]) for stage in partition.stages for one in stage.sends}
        | {one.name: sum_bytes([one]) for stage in partition.stages for one in stage.gradients_out},
        hides=lambda ahead, back, kind: costs.hides(ahead, back, split=kind is TaskKind.INPUT),
        slowest=lambda ends: _slowest_of(cluster, ends),
    )


def _slowest_of(cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of groups of ranks, the one over the slowest links."""
    by_levels = {cluster.spans(ranks): ranks for ranks in reversed(groups)}
    return max(by_levels.values(), key=lambda ranks: cluster.collective_seconds("send", 1 << 20, ranks))


def _state(price: StagePrice, number: int) -> Iterator[Bytes]:
    """What a rank keeps of a stage's parameters."""
    held: list[tuple[Kind, int, str]] = [
        ("parameter", price.resident.parameter, "parameters"),
        ("optimizer", price.resident.optimizer, "optimizer state"),
    ]
    return (Bytes(0, size, kind, name=f"{name} of stage {number}") for kind, size, name in held if size)


def _shared(
    found: CapturedStages,
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    cluster: Cluster,
    place: int,
) -> Iterator[TaskOps]:
    """The sums of the gradients of weights of several stages, tied ones for example, of which each has a part."""
    for name, captured in found.users.items():
        homes = sorted({schedule.placement[s] for s, at in enumerate(found.captured) if at in captured})
        known = found.resident.get(name)
        if known is None or len(homes) < 2 or place not in homes:
            continue
        ends = list(zip(*(groups[home].ranks for home in homes), strict=True))
        call = Collective("all_reduce", _slowest_of(cluster, ends), known.gradient, AXIS, name)
        yield TaskOps(
            (
                Op(0, f"sum of {name}", phase="reduce", queue="comm:shared weights", collective=call),
                Op(1, f"wait for {name}", phase="reduce", after=(0,)),
            )
        )


def _update(prices: Sequence[StagePrice], mine: Sequence[int], everyone: tuple[int, ...]) -> TaskOps:
    """The norm over all groups, and the update that waits for it."""
    norm = Collective("all_reduce", everyone, _NORM_BYTES, AXIS, "norm")
    totals = {GRADIENTS.format(number): number for number in mine}
    seconds = sum(prices[number].update for number in mine)
    return TaskOps(
        (
            Op(0, "gradient norm", phase="clip", queue="comm:all groups", collective=norm),
            Op(
                1,
                "update",
                phase="optimizer",
                work=Work("task", seconds=seconds),
                after=(0,),
                frees=tuple(totals.values()),
            ),
        ),
        totals,
    )
