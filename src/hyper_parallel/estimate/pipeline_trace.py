"""The Trace of a pipeline's step (`program.step_trace`) from its captured stages: gathers before the schedule of
micro-batches, reductions behind it, with all their operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.stage_capture import CapturedStages
from hyper_parallel.estimate.stage_price import StagePrice, placed, priced_stage
from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program import TaskKind, TaskOps
from hyper_parallel.program.expand import AXIS
from hyper_parallel.program.step_trace import OncePerStep, step_trace
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.stage_costs import sum_bytes
from hyper_parallel.runtime.stage_ops import adding
from hyper_parallel.schedule import Costs, Schedule
from hyper_parallel.trace import Bytes, Collective, Op, Trace


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
        number: priced_stage(stage, price, ports)
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
        besides[group.name] = OncePerStep(
            {
                number: (prices[number].resident.parameter, prices[number].resident.optimizer)
                for number in mine
            },
            sum(prices[number].update for number in mine),
            before=tuple(task for gather, _ in graphs for task in once(gather, "gather", group.ranks)),
            after=(
                *_summed(found, mine),
                *(task for _, reduce in graphs for task in once(reduce, "reduce", group.ranks)),
                *_shared(found, schedule, groups, cluster, place),
            ),
        )
    return step_trace(
        pipeline_program(partition, schedule, groups),
        stages,
        besides,
        sizes={one.name: sum_bytes([one]) for stage in partition.stages for one in stage.sends}
        | {one.name: sum_bytes([one]) for stage in partition.stages for one in stage.gradients_out},
        hides=lambda ahead, back, kind: costs.hides(ahead, back, split=kind is TaskKind.INPUT),
        slowest=cluster.slowest,
    )


def _summed(found: CapturedStages, mine: Sequence[int]) -> Iterator[TaskOps]:
    """The sums of the gradients of weights of which several stages of one rank, `mine`, have a part."""
    parts: dict[str, list[Stage]] = {}
    # Stages that are alike are captured once: what they have by one name are weights of their own.
    for place in dict.fromkeys(found.captured[number] for number in mine):
        stage = found.partition.stages[place]
        for name in stage.step.outputs:
            if name.startswith(GRADIENT):
                parts.setdefault(name, []).append(stage)
    for name, stages in parts.items():
        step = stages[0].step
        value = step.returned[name].meta["value"]
        for _ in stages[1:]:
            what, work = f"sum of {name}", adding(step, value, apart=True)
            held = Bytes(0, int(work.written), "gradient")
            yield TaskOps((Op(0, what, phase="reduce", work=work, allocates=(held,)),))


def _shared(
    found: CapturedStages,
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    cluster: Cluster,
    place: int,
) -> Iterator[TaskOps]:
    """The sums over ranks of the gradients of weights of several stages, tied ones for example."""
    for name, captured in found.users.items():
        homes = sorted({schedule.placement[s] for s, at in enumerate(found.captured) if at in captured})
        known = found.resident.get(name)
        # Where one captured stage has it, each of the stages that are like that one has a weight of its own.
        if known is None or len(captured) < 2 or len(homes) < 2 or place not in homes:
            continue
        ends = list(zip(*(groups[home].ranks for home in homes), strict=True))
        call = Collective("all_reduce", cluster.slowest(ends), known.gradient, AXIS, name)
        yield TaskOps(
            (
                Op(0, f"sum of {name}", phase="reduce", queue="comm:shared weights", collective=call),
                Op(1, f"wait for {name}", phase="reduce", after=(0,)),
            )
        )
