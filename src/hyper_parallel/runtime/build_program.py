"""Builds the Program of a pipeline, or of submodels: tasks and ports from the partition's data flow, order from a
schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.layout import Layout
from hyper_parallel.program import DeviceGroup, Port, Program, Task, TaskKind, to_program, verify
from hyper_parallel.schedule import Schedule


def pipeline_program(partition: Partition, schedule: Schedule, groups: Sequence[DeviceGroup]) -> Program:
    """The verified Program of a partition. `groups`: by rank of the schedule, with equal meshes.

    Raises StrategyError where the schedule has another number of stages, ProgramError where the Program could block.
    """
    if any(group.mesh != groups[0].mesh for group in groups):
        raise StrategyError("the stages of a pipeline have equal meshes")
    stages = partition.stages
    _check_stages(schedule, len(stages))
    homes = [groups[rank] for rank in schedule.placement]
    tasks = [task for stage in stages for task in _tasks(stage, homes[stage.number].name)]
    ports = [
        _port(one, homes[stage.number]) for stage in stages for one in (*stage.sends, *stage.gradients_out)
    ]
    return _verified(schedule, groups, tasks, ports)


@dataclass(frozen=True)
class ProgramKind:
    """Micro-batches of one kind, of those that a step has."""

    partition: Partition
    placement: tuple[int, ...]
    """Stage to the place of its device group."""
    layouts: Mapping[str, Mapping[str, Layout]]
    """Of each value that crosses, by its name and by group."""
    count: int
    """Of such micro-batches in the step."""


def step_program(
    kinds: Sequence[ProgramKind], schedule: Schedule, groups: Sequence[DeviceGroup]
) -> tuple[Program, Partition]:
    """The verified Program of submodels, whose groups may have unlike meshes, and the stages of all kinds, numbered as
    the schedule has them: kind after kind, as its micro-batches are.

    Raises as `pipeline_program` does.
    """
    stages: list[Stage] = []
    tasks: list[Task] = []
    ports: list[Port] = []
    first = 0
    for kind in kinds:
        homes = [groups[place] for place in kind.placement]
        micro_batches = tuple(range(first, first + kind.count))
        for stage in kind.partition.stages:
            numbered = replace(stage, number=len(stages))
            stages.append(numbered)
            tasks += _tasks(numbered, homes[stage.number].name, micro_batches)
            ports += [_crossing_port(one, kind, homes) for one in (*stage.sends, *stage.gradients_out)]
        first += kind.count
    _check_stages(schedule, len(stages))
    return _verified(schedule, groups, tasks, ports), Partition(tuple(stages), {})


def _crossing_port(one: Crossing, kind: ProgramKind, homes: Sequence[DeviceGroup]) -> Port:
    there = kind.layouts[one.name]
    dtype = str(one.value.dtype).removeprefix("torch.")
    home, taker = homes[one.source].name, homes[one.target].name
    return Port(one.name, there[home], dtype, home, {taker: there[taker]})


def _check_stages(schedule: Schedule, stages: int) -> None:
    if schedule.stages != stages:
        raise StrategyError(
            f"schedule {schedule.name} has {schedule.stages} stages, and the model was cut into {stages}"
        )


def _verified(
    schedule: Schedule, groups: Sequence[DeviceGroup], tasks: Iterable[Task], ports: Iterable[Port]
) -> Program:
    made = to_program(schedule, groups, tasks, ports)
    verify(made)
    return made


def _tasks(stage: Stage, group: str, micro_batches: tuple[int, ...] | None = None) -> list[Task]:
    forward = tuple(one.name for one in stage.receives), tuple(one.name for one in stage.sends)
    backward = tuple(one.name for one in stage.gradients_in), tuple(one.name for one in stage.gradients_out)
    flows = {
        TaskKind.FORWARD: forward,
        TaskKind.BACKWARD: backward,
        TaskKind.INPUT: backward,
        TaskKind.WEIGHT: ((), ()),
    }
    return [
        Task(
            f"{kind} {stage.number}",
            kind,
            group,
            takes,
            gives,
            stage=stage.number,
            micro_batches=micro_batches,
        )
        for kind, (takes, gives) in flows.items()
    ]


def _port(one: Crossing, home: DeviceGroup) -> Port:
    """Every rank of a stage sends what it has itself to the rank with its place in the other group's mesh."""
    dtype = str(one.value.dtype).removeprefix("torch.")
    return Port(one.name, Layout.replicated(home.mesh, one.value.shape), dtype, home.name)
