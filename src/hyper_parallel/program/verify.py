"""Verify a Program before it runs: it ends on every backend, and each value is where it is used.

A Program that passes ends whichever of these a communication library does: sends that wait for the receiver
(rendezvous), sends that return at once and hold their buffer, or sends that are copied away. The check of deadlocks
assumes rendezvous, which waits for most: what ends there ends with fewer waits too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import Layout
from hyper_parallel.program.check_progress import channel_defects, deadlock_defects, value_defects
from hyper_parallel.program.memory import Defect, DefectKind, at, memory_defects, shown
from hyper_parallel.program.program import (
    Instruction,
    Program,
    Recv,
    Reduce,
    Run,
    RunPair,
    Send,
    Task,
    TaskKind,
    Wait,
    runs_of,
)


def find_defects(
    program: Program, *, rendezvous: bool = True, caps: Mapping[str, int] | None = None
) -> tuple[Defect, ...]:
    """Everything that is wrong, or nothing. Each check relies on the ones before it.

    `rendezvous`: sends block until the receive is posted, the default and the stricter. Without it only a send's Wait
    blocks: for asking whether a Program that is refused would run with asynchronous sends. `caps`: bytes by group.
    """
    found = declaration_defects(program)
    if not found:
        found = [*run_defects(program), *value_defects(program), *channel_defects(program)]
    if not found:
        found = [*deadlock_defects(program, rendezvous), *memory_defects(program, caps or {})]
    return tuple(found)


def verify(program: Program, *, caps: Mapping[str, int] | None = None) -> None:
    """Raise ProgramError with every defect of a Program that can block, or whose instructions contradict each other."""
    found = find_defects(program, caps=caps)
    if found:
        shown = [f"- {defect}" for defect in found[:8]]
        more = [f"- and {len(found) - 8} more"] if len(found) > 8 else []
        raise ProgramError("\n".join(["the program cannot run:", *shown, *more]))


def declaration_defects(program: Program) -> list[Defect]:
    """Everything that makes the lists of instructions meaningless: the other checks rely on there being none."""
    texts = (*_ranks(program), *_tasks(program), *_ports(program), *_instructions(program))
    return [Defect(DefectKind.DECLARATION, text) for text in texts]


def _ranks(program: Program) -> Iterator[str]:
    lists: dict[int, str] = {}
    for name in program.instructions:
        for rank in program.groups[name].ranks:
            if rank in lists:
                yield (
                    f"rank {rank} is in {lists[rank]} and in {name}, and both have instructions: "
                    "nothing says in which order the rank issues the two lists"
                )
            lists.setdefault(rank, name)


def _tasks(program: Program) -> Iterator[str]:
    stage_groups: dict[int, str] = {}
    reduced = _reduced(program)
    for task in program.tasks.values():
        if task.stage is not None:
            group = stage_groups.setdefault(task.stage, task.group)
            if group != task.group:
                yield (
                    f"tasks of stage {task.stage} run on {group} and on {task.group}: "
                    "a micro-batch's saved values stay on one group"
                )
        for name in task.gives:
            owner = program.ports[name].group
            if owner != task.group and task.group not in reduced.get(name, set()):
                yield (
                    f"task {task.name!r} of {task.group} gives port {name!r}, which {owner} computes; "
                    "only a port that is reduced over both may be given by both"
                )


def _ports(program: Program) -> Iterator[str]:
    reduced = _reduced(program)
    given: dict[str, set[bool]] = {}
    for task in program.tasks.values():
        for given_port in task.gives:
            given.setdefault(given_port, set()).add(task.per_micro_batch)
    for name, port in program.ports.items():
        if port.group not in program.groups:
            yield f"port {name!r} is computed by group {port.group!r}, which the program does not have"
            continue
        if name not in given:
            yield f"no task gives port {name!r}"
        elif len(given[name]) > 1:
            yield f"port {name!r} is given by a task of each micro-batch and by one of the whole step"
        yield from (f"port {name!r}: {text}" for text in _layout(program, port.layout, port.group))
        for group, layout in port.received.items():
            if group not in program.groups:
                yield f"port {name!r} is received by group {group!r}, which the program does not have"
                continue
            yield from (f"port {name!r}: {text}" for text in _layout(program, layout, group))
            if layout.shape != port.layout.shape:
                yield (
                    f"port {name!r} has shape {port.layout.shape} in {port.group}, which sends it, "
                    f"and {layout.shape} in {group}, which receives it"
                )
        receivers = {task.group for task in program.tasks.values() if name in task.takes} - {port.group}
        for group in sorted((receivers | reduced.get(name, set())) - set(port.received) - {port.group}):
            if program.groups[group].mesh != program.groups[port.group].mesh:
                yield (
                    f"port {name!r} has no layout in {group}, whose mesh is not {port.group}'s: "
                    "give one in `received`"
                )


def _layout(program: Program, layout: Layout, group: str) -> Iterator[str]:
    mesh = program.groups[group].mesh
    if layout.mesh != mesh:
        yield f"its layout in {group} is on the mesh {dict(layout.mesh.axes)}; {group} has {dict(mesh.axes)}"
        return
    known = {*mesh.names, *dict(mesh.folds)}
    for axis in (*layout.split_axes, *sorted(layout.partial)):
        if unknown := {atom for atom in mesh.atoms(axis) if atom not in known}:
            yield f"its layout {layout} in {group} names axis {sorted(unknown)}, which the mesh does not have"


def _reduced(program: Program) -> dict[str, set[str]]:
    """Port to the groups over which it is reduced."""
    reduced: dict[str, set[str]] = {}
    for instructions in program.instructions.values():
        for instruction in instructions:
            if isinstance(instruction, Reduce):
                reduced.setdefault(instruction.port, set()).update(instruction.over)
    return reduced


def _instructions(program: Program) -> Iterator[str]:
    step_ports = program.step_ports()
    for group, instructions in program.instructions.items():
        for index, instruction in enumerate(instructions):
            for text in _instruction(program, group, instruction, step_ports):
                yield f"{at(group, index, instruction)} {text}"


def _instruction(
    program: Program, group: str, instruction: Instruction, step_ports: frozenset[str]
) -> Iterator[str]:
    if isinstance(instruction, Run | RunPair):
        for run in runs_of(instruction):
            yield from _run(program, group, run)
        if isinstance(instruction, RunPair):
            yield from _pair(program, instruction)
        return
    port = program.ports.get(instruction.port)
    if port is None:
        yield "names a port that the program does not have"
        return
    if isinstance(instruction, Reduce):
        if unknown := [name for name in instruction.over if name not in program.instructions]:
            yield f"is over {unknown}, which have no instructions"
        if group not in instruction.over:
            yield "is over other groups than its own"
        if port.name not in step_ports:
            yield "reduces a value of each micro-batch; only what is given once a step can be reduced"
        return
    yield from _micro_batch(program, instruction.micro_batch, once=port.name in step_ports)
    peer = _peer(instruction)
    if peer not in program.instructions:
        yield f"names {peer!r}, which is no group with instructions"
    elif peer == group:
        yield "is to the group itself: its own values are in memory"
    if isinstance(instruction, Send) and port.group != group:
        yield f"sends a value that {port.group} computes"
    if isinstance(instruction, Recv) and port.group != instruction.source:
        yield f"receives from {instruction.source} a value that {port.group} computes"


def _run(program: Program, group: str, run: Run) -> Iterator[str]:
    task = program.tasks.get(run.task)
    if task is None:
        yield "names a task that the program does not have"
        return
    if task.group != group:
        yield f"runs a task of {task.group}"
    yield from _micro_batch(program, run.micro_batch, once=not task.per_micro_batch)
    if task.micro_batches is not None and run.micro_batch not in task.micro_batches:
        yield "is for a micro-batch of another kind than the task's"


def _pair(program: Program, pair: RunPair) -> Iterator[str]:
    for run, kinds in ((pair.forward, _FORWARD), (pair.backward, _BACKWARD)):
        task = program.tasks.get(run.task)
        if task is not None and task.kind not in kinds:
            yield f"runs a {task.kind} task as the {kinds[0]} task of a pair"
    if pair.forward.micro_batch == pair.backward.micro_batch:
        yield "pairs two tasks of one micro-batch, of which the second needs the first"


_FORWARD = (TaskKind.FORWARD,)
_BACKWARD = (TaskKind.BACKWARD, TaskKind.INPUT)


def _peer(instruction: Send | Recv | Wait) -> str:
    if isinstance(instruction, Send):
        return instruction.to
    return instruction.source if isinstance(instruction, Recv) else instruction.peer


def _micro_batch(program: Program, micro_batch: int | None, once: bool) -> Iterator[str]:
    if once and micro_batch is not None:
        yield "names a micro-batch; this happens once a step"
    if not once and (micro_batch is None or not 0 <= micro_batch < program.micro_batches):
        yield f"needs a micro-batch from 0 to {program.micro_batches - 1}"


_OF_BACKWARD = (TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT)


def run_defects(program: Program) -> list[Defect]:
    """Tasks that run twice, never, or before what has to come first."""
    return [Defect(DefectKind.RUNS, text) for text in (*_counts(program), *_order(program))]


def _counts(program: Program) -> Iterator[str]:
    runs = Counter(
        (run.task, run.micro_batch)
        for instructions in program.instructions.values()
        for instruction in instructions
        for run in runs_of(instruction)
    )
    for (name, micro_batch), count in runs.items():
        if count > 1:
            where = "" if micro_batch is None else f" for micro-batch {micro_batch}"
            yield f"task {name!r} runs {count} times{where}"
    backward: dict[int, dict[TaskKind, Task]] = {}
    for task in program.tasks.values():
        if not task.per_micro_batch:
            if not runs[task.name, None]:
                yield f"task {task.name!r} never runs; it has to run once a step"
        elif task.stage is not None and task.kind in _OF_BACKWARD:
            kinds = backward.setdefault(task.stage, {})
            if task.kind in kinds:
                yield f"stage {task.stage} has two {task.kind} tasks, {kinds[task.kind].name!r} and {task.name!r}"
            kinds[task.kind] = task
        else:
            missing = [each for each in program.micro_batches_of(task) if not runs[task.name, each]]
            if missing:
                yield f"task {task.name!r} never runs for micro-batch {shown(missing)}"
    for stage, kinds in backward.items():
        for micro_batch in program.micro_batches_of(next(iter(kinds.values()))):
            ran = {kind for kind, task in kinds.items() if runs[task.name, micro_batch]}
            if ran not in ({TaskKind.BACKWARD}, {TaskKind.INPUT, TaskKind.WEIGHT}):
                yield (
                    f"stage {stage} runs {shown(sorted(ran)) or 'no backward task'} for micro-batch {micro_batch}; "
                    "it has to run backward, or input and weight"
                )


def _order(program: Program) -> Iterator[str]:
    """Forward before backward, input before weight; prologue and epilogue around the micro-batches of their stage."""
    has_forward = {task.stage for task in program.tasks.values() if task.kind is TaskKind.FORWARD}
    for group, instructions in program.instructions.items():
        runs = [
            (index, run, program.tasks[run.task])
            for index, instruction in enumerate(instructions)
            for run in runs_of(instruction)
        ]
        done: set[tuple[int | None, TaskKind, int | None]] = set()
        for index, run, task in runs:
            before = _needed(task, has_forward)
            if before is not None and (task.stage, before, run.micro_batch) not in done:
                yield f"{at(group, index, run)} comes before the {before} task of its stage and micro-batch"
            done.add((task.stage, task.kind, run.micro_batch))
        for index, run, task in runs:
            early, late = task.kind is TaskKind.GATHER, task.kind in (TaskKind.REDUCE, TaskKind.UPDATE)
            if not (early or late):
                continue
            for other_index, other_run, other in runs:
                related = task.stage is None or other.stage is None or task.stage == other.stage
                inner = other.per_micro_batch or (
                    task.kind is TaskKind.UPDATE and other.kind is TaskKind.REDUCE
                )
                if related and inner and (other_index < index if early else other_index > index):
                    yield (
                        f"{at(group, index, run)} has to come {'before' if early else 'after'} "
                        f"instruction {other_index}, {other_run}"
                    )
                    break


def _needed(task: Task, has_forward: set[int | None]) -> TaskKind | None:
    """The kind that has to have run before `task` in its stage and micro-batch."""
    if task.stage is None or task.stage not in has_forward:
        return TaskKind.INPUT if task.kind is TaskKind.WEIGHT and task.stage is not None else None
    if task.kind is TaskKind.WEIGHT:
        return TaskKind.INPUT
    return TaskKind.FORWARD if task.kind in (TaskKind.BACKWARD, TaskKind.INPUT) else None
