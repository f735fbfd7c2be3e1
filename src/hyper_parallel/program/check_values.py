"""Checks that every value is in memory when an instruction uses it: given by a task, or received and waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hyper_parallel.program.defects import Defect, DefectKind, at
from hyper_parallel.program.instructions import Instruction, Recv, Reduce, Run, RunPair, Send, Wait, runs_of
from hyper_parallel.program.program import Program, Value


def value_defects(program: Program) -> list[Defect]:
    """Uses before a value is there, waits without a transfer, transfers twice, and receives that nobody takes."""
    found = []
    for group, instructions in program.instructions.items():
        walk = _Walk(program, group, instructions)
        for index, instruction in enumerate(instructions):
            found += [f"{at(group, index, instruction)} {text}" for text in walk.step(instruction)]
        found += walk.end()
    return [Defect(DefectKind.VALUE, text) for text in found]


@dataclass
class _Walk:
    """What one group has in memory as it goes through its list."""

    program: Program
    group: str
    instructions: tuple[Instruction, ...]
    present: set[Value] = field(default_factory=set)
    posted: set[Value] = field(default_factory=set)
    sent: set[tuple[Value, str]] = field(default_factory=set)
    waited: set[tuple[Value, str]] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)
    taken: set[Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.step_ports = self.program.step_ports()
        self.to_reduce = {one.port for one in self.instructions if isinstance(one, Reduce)}

    def step(self, instruction: Instruction) -> Iterator[str]:
        """The defects of one instruction, and its effect on memory."""
        if isinstance(instruction, Run | RunPair):
            runs = runs_of(instruction)
            for run in runs:
                yield from self._takes(run)
            for run in runs:
                yield from self._gives(run)
        elif isinstance(instruction, Send):
            yield from self._send(instruction)
        elif isinstance(instruction, Recv):
            value = (instruction.port, instruction.micro_batch)
            if value in self.posted:
                yield "posts the same receive a second time"
            self.posted.add(value)
        elif isinstance(instruction, Wait):
            yield from self._wait(instruction)
        else:
            if (instruction.port, None) not in self.present:
                yield "sums a value that the group has not computed yet"
            if instruction.port in self.reduced:
                yield "sums the same value a second time"
            self.reduced.add(instruction.port)

    def _takes(self, run: Run) -> Iterator[str]:
        task = self.program.tasks[run.task]
        for port in task.takes:
            for value in self.program.values(port, run.micro_batch, self.step_ports):
                if value not in self.present:
                    yield f"takes {_name(value)}, {self._why_absent(value)}"
                self.taken.add(value)
            if port in self.to_reduce and port not in self.reduced:
                yield f"takes {port!r} before it is reduced over the groups"

    def _gives(self, run: Run) -> Iterator[str]:
        for port in self.program.tasks[run.task].gives:
            value = (port, run.micro_batch)
            if value in self.present:
                yield f"gives {_name(value)}, which is in memory already"
            self.present.add(value)

    def _send(self, send: Send) -> Iterator[str]:
        value = (send.port, send.micro_batch)
        if value not in self.present:
            yield f"sends {_name(value)}, {self._why_absent(value)}"
        if (value, send.to) in self.sent:
            yield "sends the same value a second time"
        if send.port in self.to_reduce and send.port not in self.reduced:
            yield "sends the value before it is reduced over the groups"
        self.sent.add((value, send.to))

    def _wait(self, wait: Wait) -> Iterator[str]:
        value = (wait.port, wait.micro_batch)
        if (value, wait.peer) in self.waited:
            yield "waits a second time for the same transfer"
        self.waited.add((value, wait.peer))
        if self.program.ports[wait.port].group == self.group:
            if (value, wait.peer) not in self.sent:
                yield "waits for a send that has not been issued"
            return
        if wait.peer != self.program.ports[wait.port].group:
            yield f"waits for {wait.peer}, which does not compute the value"
        if value not in self.posted:
            yield "waits for a receive that has not been posted"
        self.present.add(value)

    def _why_absent(self, value: Value) -> str:
        if self.program.ports[value[0]].group == self.group:
            return "which no task of the group has given yet"
        if value in self.posted:
            return "whose receive is posted and has not been waited for"
        return "which has not been received"

    def end(self) -> Iterator[str]:
        """Receives whose value no task takes: their buffers would never be freed."""
        for value in sorted(self.posted - self.taken, key=str):
            yield f"{self.group} receives {_name(value)}, and none of its tasks takes it afterwards"


def _name(value: Value) -> str:
    port, micro_batch = value
    return repr(port) if micro_batch is None else f"{port!r} of micro-batch {micro_batch}"
