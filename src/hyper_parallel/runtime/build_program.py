"""Builds the Program of a step: tasks and ports from the data flow of its partitions, order from a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.layout import Layout
from hyper_parallel.program import DeviceGroup, Port, Program, Task, to_program, verify
from hyper_parallel.program.build import stage_tasks
from hyper_parallel.schedule import (
    Costs,
    Schedule,
    ScheduleName,
    auto_schedule,
    named_schedule,
    time_schedule,
    with_pairs,
    with_steady_pairs,
)
from hyper_parallel.strategy import Pipeline
from hyper_parallel.strategy.axes import AUTO


def pipeline_program(partition: Partition, schedule: Schedule, groups: Sequence[DeviceGroup]) -> Program:
    """The verified Program of a partition. `groups`: by rank of the schedule, with equal meshes.

    Raises StrategyError where the schedule has another number of stages, ProgramError where the Program could block.
    """
    if any(group.mesh != groups[0].mesh for group in groups):
        raise StrategyError("the stages of a pipeline have equal meshes")
    kind = ProgramKind(partition, schedule.placement, {}, schedule.micro_batches)
    return step_program([kind], schedule, groups)[0]


@dataclass(frozen=True)
class ProgramKind:
    """Micro-batches of one kind, of those that a step has."""

    partition: Partition
    placement: tuple[int, ...]
    """Stage to the place of its device group."""
    layouts: Mapping[str, Mapping[str, Layout]]
    """Of each value that crosses, by its name and by group. A value that has none is sent by every rank as it has it,
    to the rank with its place in the other group's mesh."""
    count: int
    """Of such micro-batches in the step."""


def step_program(
    kinds: Sequence[ProgramKind], schedule: Schedule, groups: Sequence[DeviceGroup]
) -> tuple[Program, Partition]:
    """The verified Program of a step, whose groups may have unlike meshes, and the stages of all kinds, numbered as
    the schedule has them: kind after kind, as its micro-batches are.

    Raises as `pipeline_program` does.
    """
    cut = sum(len(kind.partition.stages) for kind in kinds)
    if schedule.stages != cut:
        raise StrategyError(
            f"schedule {schedule.name} has {schedule.stages} stages, and the model was cut into {cut}"
        )
    stages: list[Stage] = []
    tasks: list[Task] = []
    ports: list[Port] = []
    first = 0
    for kind in kinds:
        homes = [groups[place] for place in kind.placement]
        micro_batches = None if len(kinds) == 1 else tuple(range(first, first + kind.count))
        for stage in kind.partition.stages:
            numbered = replace(stage, number=len(stages))
            stages.append(numbered)
            home = homes[stage.number].name
            forward, backward = (
                (tuple(one.name for one in taken), tuple(one.name for one in given))
                for taken, given in (
                    (stage.receives, stage.sends),
                    (stage.gradients_in, stage.gradients_out),
                )
            )
            tasks += stage_tasks(numbered.number, home, forward, backward, micro_batches)
            ports += [_port(one, kind, homes) for one in (*stage.sends, *stage.gradients_out)]
        first += kind.count
    program = to_program(schedule, groups, tasks, ports)
    verify(program)
    return program, Partition(tuple(stages), {})


def _port(one: Crossing, kind: ProgramKind, homes: Sequence[DeviceGroup]) -> Port:
    home, taker = homes[one.source], homes[one.target].name
    dtype = str(one.value.dtype).removeprefix("torch.")
    layouts = kind.layouts.get(one.name)
    if layouts is None:
        return Port(one.name, Layout.replicated(home.mesh, one.value.shape), dtype, home.name)
    return Port(one.name, layouts[home.name], dtype, home.name, {taker: layouts[taker]})


# The schedule of a strategy's pipeline: a named one, or one that is made for the stages at hand.
#
# `train` and `simulate` take it from here, so that what is predicted is what runs. `auto` may hold as many bytes of
# saved activations on each rank as the fullest rank of 1F1B does, since the device's memory is the same on all ranks.
#
# With `overlap_forward_backward`, 1F1B is the one that begins with the forward passes that pairs need. A named schedule
# has the pairs of equal stages, and `auto` those that make the step shortest at the given costs.


def choose_schedule(pipeline: Pipeline, ranks: int, micro_batches: int, costs: Costs) -> Schedule:
    """The schedule of `costs.stages` stages on `ranks` device groups.

    Raises StrategyError, which names the keys to change, where the schedule cannot have these sizes.
    """
    paired = pipeline.overlap_forward_backward
    if pipeline.schedule == AUTO:
        caps = caps_of_1f1b(costs, ranks, micro_batches, paired=paired)
        found = auto_schedule(costs, ranks, micro_batches, caps).schedule
        if not paired:
            return found
        candidates = (with_pairs(one, costs) for one in (found, *_named(costs, ranks, micro_batches, caps)))
        return min(candidates, key=lambda one: time_schedule(one, costs).makespan)
    try:
        plain = named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual)
        if not paired:
            return plain
        ahead = named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual, paired=True)
        found = with_steady_pairs(ahead)
        # Without collectives in a stage, or with few micro-batches, the passes ahead would only take memory.
        return found if found.pairs and any(map(any, costs.hidden)) else plain
    except StrategyError as error:
        raise StrategyError(
            f"strategy.pipeline: {error}. (axes.pipeline: {ranks}; micro-batches of a step: {micro_batches}, of which "
            "a smaller train.micro_batch or a larger train.batch makes more)"
        ) from None


def _named(costs: Costs, ranks: int, micro_batches: int, caps: Sequence[float]) -> Iterator[Schedule]:
    """The named schedules of so many stages that meet the caps."""
    for name in ScheduleName:
        try:
            found = named_schedule(name, ranks, micro_batches, costs.stages // ranks, paired=True)
        except StrategyError:
            continue
        peaks = time_schedule(found, costs).peaks
        if found.stages == costs.stages and all(
            held <= cap * (1 + 1e-9) for held, cap in zip(peaks, caps, strict=True)
        ):
            yield found


def caps_of_1f1b(costs: Costs, ranks: int, micro_batches: int, *, paired: bool = False) -> tuple[float, ...]:
    """What each rank may hold: what 1F1B holds on its fullest rank, were neighbouring stages on one rank.

    `paired`: of the 1F1B that begins with the forward passes that pairs need.
    """
    parts = costs.stages // ranks
    merged = costs.merged(parts) if parts > 1 else costs
    in_flight = (min((1 + paired) * (ranks - rank), micro_batches) for rank in range(ranks))
    # One of them may be at its backward pass, which brings back what was recomputed.
    fullest = max(
        count * saved + max(0.0, -released)
        for count, saved, released in zip(in_flight, merged.saved, merged.released, strict=True)
    )
    return (fullest,) * ranks
