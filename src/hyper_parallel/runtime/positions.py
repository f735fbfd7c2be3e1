"""Positions in a Program, for people: stage, micro-batch and instruction.

A rank that stops, waits or fails in the middle of a schedule is described by them (`launch.watchdog`, errors of
`Interpreter`). They are made once, so that a step only counts instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.program import Instruction, Program, Recv, Reduce, Run, RunPair, Send, Wait


@dataclass(frozen=True)
class Position:
    """A place in the instruction list of a group."""

    text: str
    """``stage 1, micro-batch 2, Run(forward 1)``; micro-batches are counted from 0."""
    waits: bool
    """Whether a rank that stands still there waits for another group."""


def positions(program: Program, group: str) -> tuple[Position, ...]:
    """The positions of a group's instructions, and behind them that of the end of a step."""
    found = [
        Position(_text(program, group, one), isinstance(one, Send | Wait | Reduce))
        for one in program.instructions[group]
    ]
    return *found, Position("the end of the schedule, where the last sends are waited for", True)


@contextmanager
def errors_placed(
    name: Callable[[], str], known: Sequence[Position], place: Callable[[], int | None]
) -> Iterator[None]:
    """Inside, errors get the position at which they arise, `place` in `known`, behind the `name` of the step: those of
    this project in their message, others in a note. Where the place is None they get none."""
    try:
        yield
    except Exception as error:
        at = place()
        if at is None:
            raise
        where = ", ".join(filter(None, (name(), known[at].text)))
        if isinstance(error, HyperParallelError):
            error.args = (f"{where}: {error}",)
        else:
            error.add_note(f"in {where}")
        raise


def _text(program: Program, group: str, one: Instruction) -> str:
    if isinstance(one, Reduce):
        return str(one)
    if isinstance(one, RunPair):
        return " beside ".join(_text(program, group, run) for run in (one.forward, one.backward))
    stage = _stage(program, group, one)
    places = ["" if stage is None else f"stage {stage}"]
    if one.micro_batch is not None:
        places.append(f"micro-batch {one.micro_batch}")
    return ", ".join([*filter(None, places), str(replace(one, micro_batch=None))])


def _stage(program: Program, group: str, one: Run | Send | Recv | Wait) -> int | None:
    """The stage of this group that computes, or takes, what an instruction is about."""
    if isinstance(one, Run):
        return program.tasks[one.task].stage
    gives = program.ports[one.port].group == group
    return next(
        (
            task.stage
            for task in program.tasks.values()
            if task.group == group and one.port in (task.gives if gives else task.takes)
        ),
        None,
    )
