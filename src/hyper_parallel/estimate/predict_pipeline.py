"""Prediction of a pipeline's step: each stage that differs is priced once, and the schedule is timed task by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.pipeline_timeline import Ends, PipelineStep, pipeline_step
from hyper_parallel.estimate.prediction import Prediction, count_micro_batches, micro_batch
from hyper_parallel.estimate.stage_capture import CapturedStages, capture_stages, refuse_unsupported
from hyper_parallel.estimate.stage_price import StagePrice, hidden_seconds, price_stage
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program import TaskKind
from hyper_parallel.report.pipeline import GroupFigures, PipelineFigures, StageFigures
from hyper_parallel.report.sheets import describe_ranks
from hyper_parallel.runtime.build_program import choose_schedule
from hyper_parallel.runtime.stage_costs import border_bytes, sum_bytes
from hyper_parallel.schedule import Costs, Schedule, stages_of
from hyper_parallel.simulator.simulate import source_of
from hyper_parallel.step.out_of_memory import head_of
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Timeline
from hyper_parallel.workload import flops_of_model

DEPTH = 2
"""Receives of a value that a group has posted at once (`program.to_program`)."""
_NORM_BYTES = 64
"""Of the sum over all ranks that a step ends with: the norm, the loss and what else is told."""


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
    say(f"timing {sum(map(len, schedule.orders)):,} tasks of schedule {schedule.name}")
    device = cluster.device
    assert device is not None
    dtype = strategy.precision.compute
    made = pipeline_step(
        schedule,
        groups,
        prices,
        costs,
        _ends(found, prices, schedule, groups, cluster),
        _buffers(found, schedule),
        norm=cluster.collective_seconds("all_reduce", _NORM_BYTES, range(strategy.axes.world)),
    )
    tokens = config.train.batch * config.data.sequence
    flops = flops_of_model(plain).per_token(config.data.sequence) * tokens
    timeline = Timeline(
        replace(made.trace, model_flops=flops),
        made.spans,
        predicted=True,
        device=device.name,
        cluster=cluster.name,
        source=source_of(cluster),
        peak_flops=device.peak(dtype),
        capacity={"device": device.memory.bytes / device.memory.ranks},
    )
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
        pipeline=_figures(found, prices, schedule, made, timeline, groups),
        tasks=_sums(one.parts for one in prices),
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
        "a task of a stage takes as long as alone: transfers beside it do not slow it down; collectives of its own "
        "mesh are part of it, and are waited for where they begin; the update waits for the norm over all groups"
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
    names = ("forward", "input", "weight", "exposed", "gather", "reduce", "update")
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


def _buffers(found: CapturedStages, schedule: Schedule) -> list[int]:
    """Bytes of the receives that each group has posted ahead, values and gradients."""
    held = [0] * schedule.ranks
    for stage, place in enumerate(schedule.placement):
        one = found.partition.stages[found.captured[stage]]
        for number, crossings in ((stage - 1, one.receives), (stage + 1, one.gradients_in)):
            if 0 <= number < schedule.stages and schedule.placement[number] != place:
                held[place] += DEPTH * sum_bytes(crossings)
    return held


def _ends(
    found: CapturedStages,
    prices: Sequence[StagePrice],
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    cluster: Cluster,
) -> list[Ends]:
    """What each group does once a step."""
    ends = [Ends() for _ in groups]
    for stage, place in enumerate(schedule.placement):
        one, price = ends[place], prices[stage]
        ends[place] = Ends(one.gather + price.gather, one.reduce + price.reduce, one.update + price.update)
    for name, places in found.users.items():
        # A weight of several stages, tied ones for example: each has a part of its gradient.
        homes = sorted({schedule.placement[s] for s, at in enumerate(found.captured) if at in places})
        known = found.resident.get(name)
        if known is None or len(homes) < 2:
            continue
        ranks = [[groups[home].ranks[at] for home in homes] for at in range(len(groups[0].ranks))]
        seconds = max(cluster.collective_seconds("all_reduce", known.gradient, one) for one in ranks)
        for home in homes:
            ends[home] = replace(ends[home], reduce=ends[home].reduce + seconds)
    return ends


def _figures(
    found: CapturedStages,
    prices: Sequence[StagePrice],
    schedule: Schedule,
    made: PipelineStep,
    timeline: Timeline,
    groups: Sequence[DeviceGroup],
) -> PipelineFigures:
    timing = made.timing
    span = timing.makespan
    begin = min((one[0] for one in timing.starts if one), default=0.0)
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
    told = []
    for place, group in enumerate(groups):
        mine = [stage for stage, at in enumerate(schedule.placement) if at == place]
        bubble = timing.bubbles[place]
        held = [prices[stage].resident for stage in mine]
        told.append(
            GroupFigures(
                place,
                describe_ranks(timeline, group.name),
                tuple(mine),
                sum(e - s for s, e in zip(timing.starts[place], timing.ends[place], strict=True)),
                bubble.fill,
                bubble.waiting,
                bubble.drain,
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
        span - begin,
        timeline.step - (span - begin),
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
