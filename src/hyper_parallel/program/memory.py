"""Peak memory of each group: values of ports, receive and send buffers, and what forward tasks save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hyper_parallel.program.program import Program, Recv, Reduce, Send, TaskKind, Value, Wait, runs_of


def peak_bytes(program: Program) -> dict[str, tuple[int, int]]:
    """By group: bytes at the peak on the rank that holds most, and the index of the first instruction that needs them.

    A value lives from the task that gives it, or from the Recv that posts its buffer, until the last task that takes
    it and the last Wait of its sends (a send without a Wait: until the step ends). `Task.saved` lives from the forward
    task until backward, or weight: the input half frees nothing. Parameters, gradients and workspaces are not ports.
    """
    step_ports = program.step_ports()
    trained = {
        task.stage
        for task in program.tasks.values()
        if task.kind in (TaskKind.BACKWARD, TaskKind.WEIGHT) and task.stage is not None
    }
    return {group: _peak(program, group, step_ports, trained) for group in program.instructions}


def memory_defects(program: Program, caps: Mapping[str, int]) -> list[Defect]:
    """Groups whose peak exceeds their cap, in bytes."""
    if not caps:
        return []
    found = []
    for group, (peak, index) in peak_bytes(program).items():
        if group in caps and peak > caps[group]:
            text = (
                f"{group} holds {peak:,} bytes at instruction {index}, {program.instructions[group][index]}; "
                f"its cap is {caps[group]:,}"
            )
            found.append(Defect(DefectKind.MEMORY, text))
    return found


def _peak(program: Program, group: str, step_ports: frozenset[str], trained: set[int]) -> tuple[int, int]:
    instructions = program.instructions[group]
    ends = _last_uses(program, group, step_ports)
    held = {
        port for task in program.tasks.values() if task.group == group for port in (*task.takes, *task.gives)
    }
    size = {port: program.ports[port].local_bytes(group) for port in held}
    saved: dict[int | None, int] = {
        task.stage: task.saved
        for task in program.tasks.values()
        if task.kind is TaskKind.FORWARD and task.stage is not None and task.stage in trained
    }
    freed: dict[int, int] = {}
    alive = peak = where = 0
    for index, one in enumerate(instructions):
        born = 0
        if isinstance(one, Recv):
            born = size.get(one.port, 0)
            _at(freed, ends.get((one.port, one.micro_batch), len(instructions)), born)
        for run in runs_of(one):
            task = program.tasks[run.task]
            for port in task.gives:
                born += size[port]
                _at(freed, ends.get((port, run.micro_batch), index), size[port])
            if task.kind is TaskKind.FORWARD:
                born += saved.get(task.stage, 0)
            elif task.kind in (TaskKind.BACKWARD, TaskKind.WEIGHT):
                _at(freed, index, saved.get(task.stage, 0))
        alive += born
        if alive > peak:
            peak, where = alive, index
        alive -= freed.pop(index, 0)
    return peak, where


def _last_uses(program: Program, group: str, step_ports: frozenset[str]) -> dict[Value, int]:
    """The index of the instruction after which each value is no longer needed."""
    instructions = program.instructions[group]
    waits = {
        (one.port, one.micro_batch, one.peer): i
        for i, one in enumerate(instructions)
        if isinstance(one, Wait)
    }
    ends: dict[Value, int] = {}
    for index, one in enumerate(instructions):
        for run in runs_of(one):
            for port in program.tasks[run.task].takes:
                for value in program.values(port, run.micro_batch, step_ports):
                    ends[value] = max(ends.get(value, 0), index)
        if isinstance(one, Send):
            end = waits.get((one.port, one.micro_batch, one.to), len(instructions))
            key = (one.port, one.micro_batch)
            ends[key] = max(ends.get(key, 0), end)
        elif isinstance(one, Reduce):
            ends[one.port, None] = max(ends.get((one.port, None), 0), index)
    return ends


def _at(freed: dict[int, int], index: int, count: int) -> None:
    freed[index] = freed.get(index, 0) + count


class DefectKind(StrEnum):
    """What a defect is about."""

    DECLARATION = "declaration"
    """Groups, tasks, ports and layouts contradict each other, or an instruction names what does not exist."""
    RUNS = "runs"
    """A task runs twice, never, or at the wrong place in the step."""
    VALUE = "value"
    """A value is used before it is in memory."""
    CHANNEL = "channel"
    """Sends and receives, or the Reduces of several groups, do not meet one to one and in one order."""
    DEADLOCK = "deadlock"
    """Groups wait for each other in a cycle."""
    MEMORY = "memory"
    """A group holds more bytes than its cap."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong."""

    kind: DefectKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def at(group: str, index: int, instruction: object) -> str:
    """How messages name an instruction: ``stage 0's instruction 7, Send(...) to stage 1``."""
    return f"{group}'s instruction {index}, {instruction},"


def shown(values: Iterable[object], most: int = 6) -> str:
    """A list for a message: the first few, and how many more."""
    texts = [str(value) for value in values]
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest
