"""Stages for tests of `program.expand`, whose tasks are one op of known seconds each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.traces import toy
from hyper_parallel.program import GroupOps, Program, StageOps, TaskKind, TaskOps, expand
from hyper_parallel.program.expand import Hides
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Collective, Op, Timeline
from hyper_parallel.workload import Work

SAVED = 100
Seconds = tuple[float, float, float]
"""Of a forward pass, and of gradients of inputs and of weights."""


def as_built(program: Program) -> Program:
    """The Program as `runtime.build_program` has it between equal meshes: what WEIGHT tasks need stays with the stage,
    and each rank sends all that it has."""
    tasks = {
        name: replace(task, takes=()) if task.kind is TaskKind.WEIGHT else task
        for name, task in program.tasks.items()
    }
    ports = {name: replace(port, received={}) for name, port in program.ports.items()}
    return replace(program, tasks=tasks, ports=ports)


def unit_stage(
    program: Program, stage: int, seconds: Seconds = (1, 1, 1), left: int = SAVED, size: int = 0
) -> StageOps:
    """A stage that saves `SAVED` bytes, of which `left` wait for its WEIGHT half. Values that cross have `size` bytes
    and are used by one task."""
    flows: dict[TaskKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
        task.kind: (task.takes, task.gives) for task in program.tasks.values() if task.stage == stage
    }
    back = flows.get(TaskKind.INPUT) or flows.get(TaskKind.BACKWARD) or ((), ())
    kept: list[tuple[tuple[Bytes, ...], tuple[int, ...]]] = [
        ((Bytes(0, SAVED - left, "activation"), Bytes(1, left, "activation")), ()),
        ((), (0,)),
        ((), (1,)),
    ]
    crossings: list[tuple[tuple[str, ...], tuple[str, ...]]] = [flows[TaskKind.FORWARD], back, ((), ())]
    tasks, number = [], 10
    for at, ((takes, gives), (allocates, frees)) in enumerate(zip(crossings, kept, strict=True)):
        taken = {port: number + place for place, port in enumerate(takes)}
        given = {port: number + len(takes) + place for place, port in enumerate(gives)}
        number += len(takes) + len(gives)
        op = Op(
            at,
            f"{'FIW'[at]}{stage}.{{}}",
            f"stage {stage}",
            ("forward", "input gradients", "weight gradients")[at],
            work=Work("task", seconds=seconds[at]),
            allocates=(*allocates, *(Bytes(one, size, "temporary") for one in given.values())),
            frees=(*frees, *taken.values(), *given.values()),
        )
        tasks.append(TaskOps((op,), taken, given))
    forward, inputs, weight = tasks
    return StageOps(forward, inputs, weight)


def once(phase: str, seconds: float) -> TaskOps:
    """A task of the whole step."""
    return TaskOps((Op(0, phase, phase=phase, work=Work("task", seconds=seconds)),))


def norm_and_update(everyone: Sequence[int], size: int, seconds: float) -> TaskOps:
    """What all groups do together, and the update that waits for it."""
    norm = Collective("all_reduce", tuple(everyone), size, "pipeline", "norm")
    return TaskOps(
        (
            Op(0, "gradient norm", phase="clip", queue="comm:all groups", collective=norm),
            Op(1, "update", phase="optimizer", work=Work("task", seconds=seconds), after=(0,)),
        )
    )


def simulated(
    program: Program,
    stages: Mapping[int, StageOps],
    groups: Mapping[str, GroupOps] | None = None,
    *,
    size: int = 0,
    latency: float = 0.0,
    hides: Hides | None = None,
) -> Timeline:
    """The Timeline of a Program whose transfers of `size` bytes take so many seconds and a latency."""
    trace = expand(program, stages, groups, sizes=dict.fromkeys(program.ports, size), hides=hides)
    return simulate(trace, toy(latency=latency), masking=False)
