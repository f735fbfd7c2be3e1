"""Prediction of a pipeline's step: each stage that differs is priced once, the Program is expanded and simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.pipeline_trace import pipeline_trace
from hyper_parallel.estimate.prediction import Prediction, count_micro_batches, has_experts, micro_batch
from hyper_parallel.estimate.stage_capture import CapturedStages, capture_stages, refuse_unsupported
from hyper_parallel.estimate.stage_price import StagePrice, hidden_seconds, price_stage
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program import TaskKind
from hyper_parallel.report.html import schedule_begin, task_spans
from hyper_parallel.report.pipeline import GroupFigures, PipelineFigures, StageFigures
from hyper_parallel.report.sheets import describe_ranks
from hyper_parallel.runtime.build_program import choose_schedule
from hyper_parallel.runtime.stage_costs import border_bytes, sum_bytes
from hyper_parallel.schedule import Costs, Schedule, stages_of
from hyper_parallel.simulator import simulate
from hyper_parallel.step.out_of_memory import head_of
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Timeline
from hyper_parallel.workload import flops_of_model


def predict_pipeline(
    config: RunConfig,
    cluster: Cluster,
    plain: nn.Module,
    *,
    algorithm: Algorithm,
    views: bool,
    fused: bool,
    explain: bool,
    say: Callable[[str], None],
    notes: list[str],
) -> Prediction:
    """What a step of a run with `axes.pipeline` would take. `plain`: the model, on the meta device.

    Raises ConfigError, StrategyError, or CaptureError for a step that cannot be written down as a graph.
    """
    refuse_unsupported(config, explain=explain)
    strategy = config.effective_strategy
    groups = DeviceGroup.of_pipeline(strategy)
    count = count_micro_batches(config)
    # Before the capture, which takes longer: whatever the stages cost, the schedule has these sizes.
    stages = stages_of(strategy.pipeline, strategy.axes.pipeline)
    choose_schedule(strategy.pipeline, len(groups), count, Costs.even(stages))
    found = capture_stages(
        plain,
        config,
        flops_cost,
        say,
        notes,
    )
    say(f"pricing {len(found.partition.stages)} stages on {cluster.name or cluster.source}")
    apart = _places_apart(cluster, groups)
    priced = _priced(found, cluster, apart, count > 1, algorithm, views, fused)
    if len(apart) > 1:
        notes.append(
            "device groups lie differently on the links; a stage takes as long as on the slowest of them"
        )
    prices = [priced[place] for place in found.captured]
    costs = _costs(found, prices, groups, cluster)
    if strategy.pipeline.overlap_forward_backward:
        hidden = hidden_seconds(found, cluster, apart, len(groups), algorithm)
        costs = replace(costs, hidden=hidden)
    schedule = choose_schedule(strategy.pipeline, len(groups), count, costs)
    trace = pipeline_trace(found, prices, costs, schedule, groups, cluster, views, fused)
    say(f"simulating {sum(map(len, trace.ops.values())):,} ops of schedule {schedule.name}")
    tokens = config.train.batch * config.data.sequence
    flops = flops_of_model(plain).per_token(config.data.sequence) * tokens
    timeline = simulate(replace(trace, model_flops=flops), cluster, algorithm=algorithm, masking=False)
    assert cluster.device is not None
    timeline = replace(timeline, peak_flops=cluster.device.peak(strategy.precision.compute))
    notes += _notes(found, strategy, schedule)
    return Prediction(
        timeline,
        strategy,
        sum(p.numel() for p in plain.parameters()),
        tokens,
        config.data.sequence,
        micro_batch(config),
        head_of(plain),
        tuple(notes),
        pipeline=_figures(found, prices, schedule, timeline, groups),
        tasks=_sums(one.parts for one in prices),
        mixture=has_experts(plain),
    )


def _notes(found: CapturedStages, strategy: Strategy, schedule: Schedule) -> list[str]:
    told, axes = [], strategy.axes
    inside = [axis for axis in axes.order[axes.outside :] if axes.degree(axis) > 1]
    outside = [axis for axis in axes.order[: axes.outside] if axes.degree(axis) > 1]
    if outside and not inside:
        told.append(
            "axes.pipeline is the innermost axis, so that each device group's own mesh is spread over the machine; "
            "name it first in strategy.axes to keep a group's ranks together"
        )
    if not found.given:
        told.append(
            f"the layers were cut by FLOPs and bytes, as train does: strategy.pipeline.layers={list(found.counts)}"
        )
    if schedule.micro_batches == 1:
        told.append(
            "a step has one micro-batch, so that the device groups compute one after another; set train.micro_batch"
        )
    told.append(
        "collectives of a stage's own mesh are part of its tasks, and are waited for where they begin; transfers "
        "between device groups slow tasks beside them as collectives do; the update waits for the norm over all groups"
    )
    if schedule.pairs:
        told.append(
            "a forward pass beside a backward pass is priced with every collective alone on its link, and needs the "
            "peaks of both at once"
        )
    elif strategy.pipeline.overlap_forward_backward:
        told.append(
            "pipeline.overlap_forward_backward has no effect: no forward pass beside a backward pass makes this step "
            "shorter"
        )
    return told


def _places_apart(cluster: Cluster, groups: Sequence[DeviceGroup]) -> list[DeviceGroup]:
    """One device group of each way in which they lie on the link levels."""
    seen: dict[object, DeviceGroup] = {}
    for group in groups:
        lies = []
        for level in cluster.levels:
            number: dict[int, int] = {}
            lies.append(
                tuple(number.setdefault(cluster.island(rank, level), len(number)) for rank in group.ranks)
            )
        seen.setdefault(tuple(lies), group)
    return list(seen.values())


def _priced(
    found: CapturedStages,
    cluster: Cluster,
    places: Sequence[DeviceGroup],
    several: bool,
    algorithm: Algorithm,
    views: bool,
    fused: bool,
) -> list[StagePrice]:
    """The prices of the stages that differ, each on the slowest of the places of device groups. `several`, `fused`: of
    `price_stage`."""
    return [
        _slowest(
            [
                price_stage(
                    found,
                    stage,
                    cluster,
                    group.ranks,
                    several=several,
                    algorithm=algorithm,
                    views=views,
                    fused=fused,
                )
                for group in places
            ]
        )
        for stage in found.partition.stages
    ]


def _slowest(prices: Sequence[StagePrice]) -> StagePrice:
    """One price with the longest of each time."""
    names = ("forward", "input", "weight", "exposed", "update")
    longest = {name: max(getattr(one, name) for one in prices) for name in names}
    return replace(prices[0], **longest)


def _costs(
    found: CapturedStages, prices: Sequence[StagePrice], groups: Sequence[DeviceGroup], cluster: Cluster
) -> Costs:
    """What a schedule needs to know of the stages."""
    return Costs(
        forward=tuple(one.forward for one in prices),
        backward=tuple(one.input + one.weight for one in prices),
        input=tuple(one.input for one in prices),
        weight=tuple(one.weight for one in prices),
        transfers=tuple(_transfer(found, border, groups, cluster) for border in range(found.stages - 1)),
        saved=tuple(float(one.memory.saved) for one in prices),
        released=tuple(float(one.memory.saved - one.memory.left) for one in prices),
    )


def _transfer(found: CapturedStages, border: int, groups: Sequence[DeviceGroup], cluster: Cluster) -> float:
    """Seconds over a border: each rank sends to the one with its place in the other group."""
    count = _border(found, border)
    if len(groups) == found.stages:
        pairs = [(groups[border], groups[border + 1])]
    else:
        # Where a rank has several stages, the schedule decides which groups are neighbours: the slowest link of all.
        pairs = list(zip(groups, (*groups[1:], groups[0]), strict=True))
    seconds = {
        cluster.spans(ends): cluster.collective_seconds("send", count, ends)
        for source, target in pairs
        for ends in zip(source.ranks, target.ranks, strict=True)
        if ends[0] != ends[1]
    }
    return max(seconds.values(), default=0.0)


def _border(found: CapturedStages, border: int) -> int:
    """Bytes that one rank sends over a border, in the busier direction."""
    stages = found.partition.stages
    if len(stages) == found.stages:
        return border_bytes(found.partition, border)
    here, there = stages[found.captured[border]], stages[found.captured[border + 1]]
    return max(sum_bytes(here.sends), sum_bytes(there.gradients_out))


def _figures(
    found: CapturedStages,
    prices: Sequence[StagePrice],
    schedule: Schedule,
    timeline: Timeline,
    groups: Sequence[DeviceGroup],
) -> PipelineFigures:
    stages = tuple(
        StageFigures(
            stage,
            schedule.placement[stage],
            found.counts[stage],
            price.forward,
            price.input,
            price.weight,
            price.exposed,
            price.memory.saved,
            _border(found, stage) if stage + 1 < found.stages else 0,
        )
        for stage, price in enumerate(prices)
    )
    tasks = {group.name: task_spans(timeline, group.name) for group in groups}
    begins = {name: min(spans[0].start, schedule_begin(timeline, name)) for name, spans in tasks.items()}
    begin = min(begins.values())
    end = max(spans[-1].end for spans in tasks.values())
    told = []
    for place, group in enumerate(groups):
        mine = [stage for stage, at in enumerate(schedule.placement) if at == place]
        spans = tasks[group.name]
        computing = sum(span.end - span.start for span in spans)
        fill, drain = spans[0].start - begins[group.name], end - spans[-1].end
        held = [prices[stage].resident for stage in mine]
        told.append(
            GroupFigures(
                place,
                describe_ranks(timeline, group.name),
                tuple(mine),
                computing,
                fill,
                spans[-1].end - spans[0].start - computing,
                drain,
                timeline.peak_of(group.name).bytes,
                sum(one.parameter + one.gradient + one.optimizer for one in held)
                + sum(prices[stage].gathered for stage in mine),
                _in_flight(schedule, place),
            )
        )
    return PipelineFigures(
        schedule.name,
        found.counts,
        schedule.micro_batches,
        end - begin,
        timeline.step - (end - begin),
        stages,
        tuple(told),
        sum(map(len, schedule.pairs)),
    )


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by part of all stages together."""
    found: defaultdict[str, float] = defaultdict(float)
    for one in parts:
        for name, seconds in one.items():
            found[name] += seconds
    return dict(found)


def _in_flight(schedule: Schedule, rank: int) -> int:
    held = most = 0
    for action in schedule.orders[rank]:
        held += action.kind is TaskKind.FORWARD
        most = max(most, held)
        held -= action.kind in (TaskKind.WEIGHT, TaskKind.BACKWARD)
    return most
