"""Builds the Program of a pipeline, or of submodels: tasks and ports from the partition's data flow, order from a
schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    return _program(partition, schedule, groups, _port)


def submodel_program(
    partition: Partition,
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    layouts: Mapping[str, Mapping[str, Layout]],
) -> Program:
    """The verified Program of submodels, whose groups may have unlike meshes. `groups`: by rank of the schedule;
    `layouts`: of each value that crosses, by its name and by group.

    Raises as `pipeline_program` does.
    """
    homes = {stage: groups[rank].name for stage, rank in enumerate(schedule.placement)}

    def port(one: Crossing, home: DeviceGroup) -> Port:
        there = layouts[one.name]
        dtype = str(one.value.dtype).removeprefix("torch.")
        taker = homes[one.target]
        return Port(one.name, there[home.name], dtype, home.name, {taker: there[taker]})

    return _program(partition, schedule, groups, port)


def _program(
    partition: Partition,
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    port: Callable[[Crossing, DeviceGroup], Port],
) -> Program:
    if schedule.stages != len(partition.stages):
        raise StrategyError(
            f"schedule {schedule.name} has {schedule.stages} stages, and the model was cut into {len(partition.stages)}"
        )
    homes = [groups[rank] for rank in schedule.placement]
    tasks = [task for stage in partition.stages for task in _tasks(stage, homes[stage.number].name)]
    ports = [
        port(one, homes[stage.number])
        for stage in partition.stages
        for one in (*stage.sends, *stage.gradients_out)
    ]
    made = to_program(schedule, groups, tasks, ports)
    verify(made)
    return made


def _tasks(stage: Stage, group: str) -> list[Task]:
    forward = tuple(one.name for one in stage.receives), tuple(one.name for one in stage.sends)
    backward = tuple(one.name for one in stage.gradients_in), tuple(one.name for one in stage.gradients_out)
    flows = {
        TaskKind.FORWARD: forward,
        TaskKind.BACKWARD: backward,
        TaskKind.INPUT: backward,
        TaskKind.WEIGHT: ((), ()),
    }
    return [
        Task(f"{kind} {stage.number}", kind, group, takes, gives, stage=stage.number)
        for kind, (takes, gives) in flows.items()
    ]


def _port(one: Crossing, home: DeviceGroup) -> Port:
    """Every rank of a stage sends what it has itself to the rank with its place in the other group's mesh."""
    dtype = str(one.value.dtype).removeprefix("torch.")
    return Port(one.name, Layout.replicated(home.mesh, one.value.shape), dtype, home.name)
