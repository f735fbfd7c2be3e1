"""The Trace of a step whose stages have prices: its Program, expanded, with what runs once a step around it.

    before (once)  ·  the instruction list  ·  after (once)  ·  norm over all groups  ·  update (once)

A task is one op of as many seconds as its stage was priced at, collectives of its own mesh included, since a step of
512 micro-batches would have millions of operators. What runs once a step may have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyper_parallel.program.expand import AXIS, GroupOps, Hides, StageOps, TaskOps, expand
from hyper_parallel.program.program import Program
from hyper_parallel.program.transfers import Slowest
from hyper_parallel.trace import Bytes, Collective, Op, Trace
from hyper_parallel.trace.trace import Kind
from hyper_parallel.workload.work import Work

_NORM_BYTES = 64
"""Of the sum over all ranks that a step ends with: the norm, the loss and what else is told."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one micro-batch in a stage, without parameters and what else lasts."""

    saved: int
    """Alive at the end of the forward pass, for the backward pass."""
    left: int
    """Of it and of what came since, alive at the end of the INPUT half, for the WEIGHT half."""
    peaks: tuple[int, int, int]
    """Alive at most in the forward pass, in the INPUT half and in the WEIGHT half."""


@dataclass(frozen=True)
class PortMemory:
    """The memory of a value that crosses, in a stage that takes or gives it."""

    storage: int
    bytes: int
    place: int
    """Index of the last node that uses it."""
    last: int
    """The task of that node: 0 forward, 1 INPUT, 2 WEIGHT."""


Ports = Mapping[str, PortMemory]
"""By name. What one stage takes and gives has different storages but where it is the same memory."""


@dataclass(frozen=True)
class PricedStage:
    """A stage on one rank, for one micro-batch."""

    seconds: tuple[float, float, float]
    """Of the forward pass, the INPUT half and the WEIGHT half."""
    memory: StageMemory
    gradient: int
    """Bytes to which micro-batches add their gradients."""
    receives: Ports = field(default_factory=dict)
    sends: Ports = field(default_factory=dict)
    gradients_in: Ports = field(default_factory=dict)
    gradients_out: Ports = field(default_factory=dict)


@dataclass(frozen=True)
class OncePerStep:
    """What the ranks of a device group hold, and do once a step. Ranks of collectives are global."""

    parameters: Mapping[int, tuple[int, int]]
    """Stage to the bytes of its parameters, and of their optimizer state; of stages of several kinds the first one."""
    update: float
    """Seconds."""
    before: tuple[TaskOps, ...] = ()
    after: tuple[TaskOps, ...] = ()


def step_trace(
    program: Program,
    stages: Mapping[int, PricedStage],
    once: Mapping[str, OncePerStep],
    *,
    sizes: Mapping[str, int] | None = None,
    joined: Mapping[int, int] | None = None,
    hides: Hides | None = None,
    slowest: Slowest | None = None,
) -> Trace:
    """The Trace of a step. `stages`: by number; `once`: by device group; the others as of `program.expand.expand`."""
    joined = joined or {}
    everyone = tuple(rank for group in program.groups.values() for rank in group.ranks)
    return expand(
        program,
        {number: task_ops(stage, number, joined.get(number, number)) for number, stage in stages.items()},
        {
            name: GroupOps(
                tuple(held for number, sizes in own.parameters.items() for held in _state(number, *sizes)),
                own.before,
                (*own.after, _update(tuple(own.parameters), own.update, everyone)),
            )
            for name, own in once.items()
        },
        sizes=sizes,
        joined=joined,
        hides=hides,
        slowest=slowest,
    )


def _state(number: int, parameter: int, optimizer: int) -> list[Bytes]:
    """What a rank keeps of a stage's parameters."""
    held: list[tuple[Kind, int, str]] = [
        ("parameter", parameter, "parameters"),
        ("optimizer", optimizer, "optimizer state"),
    ]
    return [Bytes(0, size, kind, name=f"{name} of stage {number}") for kind, size, name in held if size]


def _update(mine: Sequence[int], seconds: float, everyone: tuple[int, ...]) -> TaskOps:
    """The norm over all groups, and the update that waits for it."""
    norm = Collective("all_reduce", everyone, _NORM_BYTES, AXIS, "norm")
    totals = {GRADIENTS.format(number): number for number in mine}
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


GRADIENTS = "gradients of stage {}"
"""The name of the memory that a stage's micro-batches add their gradients to."""
_EARLY, _KEPT, _BACK, _TOTAL, _WORKING = -1, -2, -3, -4, -5
"""Storages besides those of values that cross: what the INPUT half frees of what is saved, what stays for the WEIGHT
half, what recomputation brings back for it, the gradients, and, downwards, what each task needs while it runs."""
_PHASES = ("forward", "input gradients", "weight gradients")


def task_ops(stage: PricedStage, number: int, adds_to: int) -> StageOps:
    """The tasks of a stage, an op each. `adds_to`: the stage whose gradients are in one memory with its own."""
    memory = stage.memory

    def of(*ports: Ports) -> dict[int, PortMemory]:
        return {one.storage: one for named in ports for one in named.values()}

    def bytes_in(values: Mapping[int, PortMemory], task: int) -> int:
        return sum(one.bytes for one in values.values() if one.last >= task)

    def named(ports: Ports) -> dict[str, int]:
        return {name: one.storage for name, one in ports.items()}

    received, forward = of(stage.receives, stage.gradients_in), of(stage.receives, stage.sends)
    values = forward | of(stage.gradients_in, stage.gradients_out)
    saved = max(0, memory.saved - bytes_in(forward, 1))
    left = max(0, memory.left - bytes_in(values, 2))
    early, back = max(0, saved - left), max(0, left - saved)
    halves = [
        ({_EARLY: early, _KEPT: saved - early}, of(stage.sends), (), saved + bytes_in(forward, 0)),
        ({_BACK: back}, of(stage.gradients_out), (_EARLY,), saved + back + bytes_in(values, 1)),
        ({}, {}, (_KEPT, _BACK), left + bytes_in(values, 2)),
    ]
    ops = []
    for task, (kept, made, frees, base) in enumerate(halves):
        working = _WORKING - task
        there = received if task == 0 else received | forward
        new = {storage: one.bytes for storage, one in made.items() if storage not in there}
        needed = {working: max(0, memory.peaks[task] - base)}
        kinds: dict[Kind, dict[int, int]] = {"activation": kept, "temporary": needed}
        kinds["temporary" if task else "activation"] |= new
        ops.append(
            Op(
                task,
                f"{'FIW'[task]}{number}.{{}}",
                f"stage {number}",
                _PHASES[task],
                work=Work("task", seconds=stage.seconds[task]),
                allocates=tuple(
                    Bytes(storage, size, kind)
                    for kind, sizes in kinds.items()
                    for storage, size in sizes.items()
                ),
                frees=(*frees, working, *(storage for storage, one in values.items() if one.last == task)),
            )
        )
    total = Bytes(_TOTAL, stage.gradient, "gradient", name=GRADIENTS.format(adds_to))
    gradients = Op(len(ops), total.name, f"stage {number}", _PHASES[2], allocates=(total,))
    return StageOps(
        TaskOps((ops[0],), named(stage.receives), named(stage.sends)),
        TaskOps((ops[1],), named(stage.gradients_in), named(stage.gradients_out)),
        TaskOps((gradients, ops[2]), first={gradients.index: total.name}),
        {total.name: _TOTAL},
    )
