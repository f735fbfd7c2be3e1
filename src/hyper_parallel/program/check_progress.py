"""Deadlock check: run the instruction lists until nothing moves, and name the cycle of groups that wait.

Every condition that an instruction waits for (the other group has posted, has sent) stays true
once it is true, and no instruction chooses. So the lists are a deterministic process network (Kahn 1974): if one order
of execution ends, every order ends, and one greedy run decides.

A group stands for all its ranks. The ranks' own waits map onto the groups' (a rank waits for its own previous
instruction, for ranks of a group that its group waits for, or for its fellows in a collective of a task), so what has
no cycle between groups has none between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hyper_parallel.program.program import (
    Instruction,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    Value,
    Wait,
    runs_of,
)


class DefectKind(StrEnum):
    """What a defect is about."""

    DECLARATION = "declaration"
    """Groups, tasks, ports and layouts contradict each other, or an instruction names what does not exist."""
    RUNS = "runs"
    """A task runs twice, never, or at the wrong place in the step."""
    VALUE = "value"
    """A value is used before it is in memory."""
    CHANNEL = "channel"
    """Sends and receives do not meet one to one and in one order."""
    DEADLOCK = "deadlock"
    """Groups wait for each other in a cycle."""


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


def deadlock_defects(program: Program, rendezvous: bool = True) -> list[Defect]:
    """The cycle at which the program stops, if it does.

    `rendezvous`: a send blocks until the receive is posted. Otherwise only its Wait does. Sends and receives have to
    match (`channel_defects` finds nothing).
    """
    conditions = _conditions(program, rendezvous)
    position = dict.fromkeys(program.instructions, 0)
    moved = True
    while moved:
        moved = False
        for group, instructions in program.instructions.items():
            while position[group] < len(instructions):
                needs = conditions.get((group, position[group]), ())
                if any(position[other] < least for other, least in needs):
                    break
                position[group] += 1
                moved = True
    blocked = [group for group, at in position.items() if at < len(program.instructions[group])]
    return [Defect(DefectKind.DEADLOCK, _cycle(program, position, conditions, blocked))] if blocked else []


def _conditions(program: Program, rendezvous: bool) -> dict[Place, list[tuple[str, int]]]:
    """For each instruction that can block: groups, and how many instructions each has to have completed by then."""
    sends, receives = channels(program)
    conditions: dict[Place, list[tuple[str, int]]] = {}
    # By waiting group, its peer and the value: when the transfer is over for that group.
    over: dict[tuple[str, str, str, int], list[tuple[str, int]]] = {}
    for (source, target), out in sends.items():
        for ((_, sent), send), ((_, posted), _) in zip(out, receives[source, target], strict=True):
            if rendezvous:
                conditions[source, sent] = [(target, posted + 1)]
            over[source, target, send.port, send.micro_batch] = [(target, posted + 1)]
            over[target, source, send.port, send.micro_batch] = [(source, sent + 1)]
    for group, instructions in program.instructions.items():
        for index, one in enumerate(instructions):
            if isinstance(one, Wait):
                conditions[group, index] = over[group, one.peer, one.port, one.micro_batch]
    return conditions


def _cycle(
    program: Program,
    position: dict[str, int],
    conditions: dict[Place, list[tuple[str, int]]],
    blocked: list[str],
) -> str:
    group, path = blocked[0], []
    while group not in path:
        path.append(group)
        needs = conditions[group, position[group]]
        group = next(other for other, least in needs if position[other] < least)
    path = path[path.index(group) :]
    lines = [f"{', '.join(path)} wait for each other in a cycle:"]
    for waiting, awaited in zip(path, [*path[1:], path[0]], strict=True):
        index = position[waiting]
        one = program.instructions[waiting][index]
        least = next(
            least
            for other, least in conditions[waiting, index]
            if other == awaited and position[other] < least
        )
        what = _for(program, awaited, least)
        where = _ranks(program.groups[waiting].ranks)
        lines.append(f"  {waiting} ({where}) stands at instruction {index}, {one}, and waits {what}")
    lines.append(_advice(program, position, path))
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {shown(ranks)}"


def _for(program: Program, awaited: str, least: int) -> str:
    other = program.instructions[awaited][least - 1]
    verb = "posts" if isinstance(other, Recv) else "issues"
    return f"until {awaited} {verb} its instruction {least - 1}, {other}"


def _advice(program: Program, position: dict[str, int], path: list[str]) -> str:
    if any(isinstance(program.instructions[group][position[group]], Send) for group in path):
        return "  post one of these receives before its group sends or waits"
    return "  one of these has to come earlier in its group's list"


Place = tuple[str, int]
"""A group and the index of an instruction in its list."""
Channel = tuple[str, str]
"""Sending and receiving group."""


def channels(
    program: Program,
) -> tuple[dict[Channel, list[tuple[Place, Send]]], dict[Channel, list[tuple[Place, Recv]]]]:
    """Sends and receives of each channel, in the order in which their group issues them."""
    sends: dict[Channel, list[tuple[Place, Send]]] = {}
    receives: dict[Channel, list[tuple[Place, Recv]]] = {}
    for group, instructions in program.instructions.items():
        for index, one in enumerate(instructions):
            if isinstance(one, Send):
                sends.setdefault((group, one.to), []).append(((group, index), one))
            elif isinstance(one, Recv):
                receives.setdefault((one.source, group), []).append(((group, index), one))
    return sends, receives


def channel_defects(program: Program) -> list[Defect]:
    """Transfers of which one end is missing, and orders that differ between the two ends."""
    return [Defect(DefectKind.CHANNEL, text) for text in _transfers(program)]


def _transfers(program: Program) -> Iterator[str]:
    sends, receives = channels(program)
    for channel in sorted({*sends, *receives}):
        out, into = sends.get(channel, []), receives.get(channel, [])
        sent = {(one.port, one.micro_batch) for _, one in out}
        received = {(one.port, one.micro_batch) for _, one in into}
        for (group, index), send in out:
            if (send.port, send.micro_batch) not in received:
                yield f"{at(group, index, send)} has no matching Recv in {channel[1]}"
        for (group, index), receive in into:
            if (receive.port, receive.micro_batch) not in sent:
                yield f"{at(group, index, receive)} has no matching Send in {channel[0]}"
        if sent != received or len(out) != len(sent) or len(into) != len(received):
            continue
        for (source, send), (target, receive) in zip(out, into, strict=True):
            if (send.port, send.micro_batch) != (receive.port, receive.micro_batch):
                yield (
                    f"from {channel[0]} to {channel[1]} the order of sends is not that of receives: "
                    f"{at(*source, send)} would meet {at(*target, receive)} since transfers between two groups have "
                    "no tags; put both in one order"
                )
                break


def value_defects(program: Program) -> list[Defect]:
    """Uses before a value is there, waits without a transfer, transfers twice, and receives that nobody takes."""
    found = []
    for group, instructions in program.instructions.items():
        walk = _Walk(program, group)
        for index, instruction in enumerate(instructions):
            found += [f"{at(group, index, instruction)} {text}" for text in walk.step(instruction)]
        found += walk.end()
    return [Defect(DefectKind.VALUE, text) for text in found]


@dataclass
class _Walk:
    """What one group has in memory as it goes through its list."""

    program: Program
    group: str
    present: set[Value] = field(default_factory=set)
    posted: set[Value] = field(default_factory=set)
    sent: set[tuple[Value, str]] = field(default_factory=set)
    waited: set[tuple[Value, str]] = field(default_factory=set)
    taken: set[Value] = field(default_factory=set)

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
        else:
            yield from self._wait(instruction)

    def _takes(self, run: Run) -> Iterator[str]:
        for port in self.program.tasks[run.task].takes:
            value = (port, run.micro_batch)
            if value not in self.present:
                yield f"takes {_name(value)}, {self._why_absent(value)}"
            self.taken.add(value)

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
    return f"{port!r} of micro-batch {micro_batch}"
