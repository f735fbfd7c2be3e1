"""Verify a Program before it runs: it ends on every backend, and each value is where it is used.

A Program that passes ends whichever of these a communication library does: sends that wait for the receiver
(rendezvous), sends that return at once and hold their buffer, or sends that are copied away. The check of deadlocks
assumes rendezvous, which waits for most: what ends there ends with fewer waits too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import Layout
from hyper_parallel.program.check_progress import (
    Defect,
    DefectKind,
    at,
    channel_defects,
    deadlock_defects,
    shown,
    value_defects,
)
from hyper_parallel.program.program import (
    Instruction,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    Task,
    TaskKind,
    Wait,
    runs_of,
)


def find_defects(program: Program, *, rendezvous: bool = True) -> tuple[Defect, ...]:
    """Everything that is wrong, or nothing. Each check relies on the ones before it.

    `rendezvous`: sends block until the receive is posted, the default and the stricter. Without it only a send's Wait
    blocks: for asking whether a Program that is refused would run with asynchronous sends.
    """
    found = declaration_defects(program)
    if not found:
        found = [*run_defects(program), *value_defects(program), *channel_defects(program)]
    if not found:
        found = deadlock_defects(program, rendezvous)
    return tuple(found)


def verify(program: Program) -> None:
    """Raise ProgramError with every defect of a Program that can block, or whose instructions contradict each other."""
    found = find_defects(program)
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
            if owner != task.group:
                yield f"task {task.name!r} of {task.group} gives port {name!r}, which {owner} computes"


def _ports(program: Program) -> Iterator[str]:
    given = {port for task in program.tasks.values() for port in task.gives}
    for name, port in program.ports.items():
        if port.group not in program.groups:
            yield f"port {name!r} is computed by group {port.group!r}, which the program does not have"
            continue
        if name not in given:
            yield f"no task gives port {name!r}"
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
        for group in sorted(receivers - set(port.received)):
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


def _instructions(program: Program) -> Iterator[str]:
    for group, instructions in program.instructions.items():
        for index, instruction in enumerate(instructions):
            for text in _instruction(program, group, instruction):
                yield f"{at(group, index, instruction)} {text}"


def _instruction(program: Program, group: str, instruction: Instruction) -> Iterator[str]:
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
    yield from _micro_batch(program, instruction.micro_batch)
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
    yield from _micro_batch(program, run.micro_batch)
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


def _micro_batch(program: Program, micro_batch: int) -> Iterator[str]:
    if not 0 <= micro_batch < program.micro_batches:
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
            yield f"task {name!r} runs {count} times for micro-batch {micro_batch}"
    backward: dict[int, dict[TaskKind, Task]] = {}
    for task in program.tasks.values():
        if task.stage is not None and task.kind in _OF_BACKWARD:
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
    """Forward before backward, input before weight."""
    has_forward = {task.stage for task in program.tasks.values() if task.kind is TaskKind.FORWARD}
    for group, instructions in program.instructions.items():
        done: set[tuple[int | None, TaskKind, int]] = set()
        for index, instruction in enumerate(instructions):
            for run in runs_of(instruction):
                task = program.tasks[run.task]
                before = _needed(task, has_forward)
                if before is not None and (task.stage, before, run.micro_batch) not in done:
                    yield f"{at(group, index, run)} comes before the {before} task of its stage and micro-batch"
                done.add((task.stage, task.kind, run.micro_batch))


def _needed(task: Task, has_forward: set[int | None]) -> TaskKind | None:
    """The kind that has to have run before `task` in its stage and micro-batch."""
    if task.stage is None or task.stage not in has_forward:
        return TaskKind.INPUT if task.kind is TaskKind.WEIGHT and task.stage is not None else None
    if task.kind is TaskKind.WEIGHT:
        return TaskKind.INPUT
    return TaskKind.FORWARD if task.kind in (TaskKind.BACKWARD, TaskKind.INPUT) else None
