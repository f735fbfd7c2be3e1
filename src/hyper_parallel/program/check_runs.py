"""Checks that each task runs once for each micro-batch, or once a step, and in the order of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hyper_parallel.program.defects import Defect, DefectKind, at, shown
from hyper_parallel.program.instructions import runs_of
from hyper_parallel.program.program import Program
from hyper_parallel.program.task import Task, TaskKind

_BACKWARD = (TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT)


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
        elif task.stage is not None and task.kind in _BACKWARD:
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
