"""Exhaustive search of a Program's states: every interleaving of its groups, with channels that count transfers.

Independent of the verifier: no pairing of sends and receives beforehand, no notion of cycle. A state is how far each
group is. A channel between two groups is first in, first out: what was sent and posted is counted from the prefixes
of the two lists, and the k-th posted receive gets the value of the k-th send, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.program import Program, Recv, Run, Send, Task, TaskKind, Wait

Value = tuple[str, int]


@dataclass(frozen=True)
class Together:
    """Blocks until every group of `over` has reached the same one: a collective of ranks, each of them a group here."""

    over: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the search found: states that stop short of the end, and errors of data."""

    states: int
    stuck: tuple[tuple[int, ...], ...]
    errors: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the Program ends in every interleaving, with the right values."""
        return not self.stuck and not self.errors


def search(program: Program, rendezvous: bool = True) -> Outcome:
    """Explore all reachable states. For Programs of a few groups with some tens of instructions."""
    names = list(program.instructions)
    lists = [program.instructions[name] for name in names]
    needs = [
        [_needs(program, names, me, at, rendezvous) for at in range(len(instructions))]
        for me, instructions in enumerate(lists)
    ]
    start = (0,) * len(names)
    end = tuple(len(one) for one in lists)
    seen, todo = {start}, [start]
    stuck: list[tuple[int, ...]] = []
    while todo:
        state = todo.pop()
        moved = False
        for me, at in enumerate(state):
            if at < end[me] and all(state[other] >= least for other, least in needs[me][at]):
                moved = True
                after = (*state[:me], at + 1, *state[me + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        if not moved and state != end:
            stuck.append(state)
    return Outcome(len(seen), tuple(stuck), tuple(_data_errors(program)))


NEVER = 10**9


def _needs(program: Program, names: list[str], me: int, at: int, rendezvous: bool) -> list[tuple[int, int]]:
    """How many instructions each other group has to have completed before this one can complete, by counting."""
    mine = program.instructions[names[me]]
    one = mine[at]

    def when(other: str, count: int, wanted) -> list[tuple[int, int]]:
        """After how many instructions the other group has issued `count` of the wanted ones."""
        places = [i for i, each in enumerate(program.instructions[other]) if wanted(each)]
        return [(names.index(other), places[count - 1] + 1 if len(places) >= count else NEVER)]

    if isinstance(one, Send) and rendezvous:
        count = sum(isinstance(each, Send) and each.to == one.to for each in mine[: at + 1])
        return when(one.to, count, lambda each: isinstance(each, Recv) and each.source == names[me])
    if isinstance(one, Wait):
        own = program.ports[one.port].group == names[me]
        value = (one.port, one.micro_batch)
        if own:
            ends = [each for each in mine[:at] if isinstance(each, Send) and each.to == one.peer]
        else:
            ends = [each for each in mine[:at] if isinstance(each, Recv) and each.source == one.peer]
        count = next((k + 1 for k, each in enumerate(ends) if (each.port, each.micro_batch) == value), 0)
        if count == 0:
            return []  # There is nothing to wait for: an error of data, and no reason to stand still.
        if own:
            return when(one.peer, count, lambda each: isinstance(each, Recv) and each.source == names[me])
        return when(one.peer, count, lambda each: isinstance(each, Send) and each.to == names[me])
    if isinstance(one, Together):
        count = sum(each == one for each in mine[: at + 1])
        found = []
        for other in one.over:
            if other != names[me]:
                met = when(other, count, lambda each: each == one)
                # The other group has to have reached it, not completed it.
                found += [(rank, place - 1) for rank, place in met]
        return found
    return []


def _data_errors(program: Program) -> list[str]:
    """What goes wrong with values and counts in a run that gets to the end.

    Which value a receive gets depends on the two lists alone, not on the interleaving.
    """
    errors: list[str] = []
    ran: dict[tuple[str, int], int] = {}
    outgoing: dict[tuple[str, str], list[Value]] = {}
    incoming: dict[tuple[str, str], list[Value]] = {}
    for name, instructions in program.instructions.items():
        for one in instructions:
            if isinstance(one, Send):
                outgoing.setdefault((name, one.to), []).append((one.port, one.micro_batch))
            elif isinstance(one, Recv):
                incoming.setdefault((one.source, name), []).append((one.port, one.micro_batch))
    errors += [
        f"channel {channel}: {outgoing.get(channel)} meets {incoming.get(channel)}"
        for channel in {*outgoing, *incoming}
        if outgoing.get(channel, []) != incoming.get(channel, [])
    ]
    for name, instructions in program.instructions.items():
        errors += _memory_errors(program, name, instructions, ran)
    stages = {task.stage for task in program.tasks.values() if task.stage is not None}
    for micro_batch in range(program.micro_batches):
        for stage in stages:
            ways = {kind: _ran(program, ran, stage, kind, micro_batch) for kind in TaskKind}
            good = ways[TaskKind.FORWARD] == 1 and (
                ways[TaskKind.BACKWARD],
                ways[TaskKind.INPUT],
                ways[TaskKind.WEIGHT],
            ) in ((1, 0, 0), (0, 1, 1))
            if not good:
                errors.append(f"stage {stage}, micro-batch {micro_batch} ran {ways}")
    return errors


def _ran(program: Program, ran: dict, stage: int, kind: TaskKind, micro_batch: int) -> int:
    tasks = (t for t in program.tasks.values() if t.stage == stage and t.kind is kind)
    return sum(ran.get((task.name, micro_batch), 0) for task in tasks)


def _memory_errors(program: Program, name: str, instructions: tuple, ran: dict) -> list[str]:
    errors: list[str] = []
    memory: set[Value] = set()
    buffers: dict[Value, bool] = {}
    sent: set[tuple[Value, str]] = set()
    waited: set[tuple[Value, str]] = set()
    history: list[tuple[Task, int]] = []
    for one in instructions:
        if isinstance(one, Run):
            task = program.tasks[one.task]
            for port in task.takes:
                value = (port, one.micro_batch)
                if value not in memory:
                    errors.append(f"{name}: {one} lacks {value}")
                if value in buffers:
                    buffers[value] = True
            memory |= {(port, one.micro_batch) for port in task.gives}
            errors += _order_errors(name, one, task, history)
            history.append((task, one.micro_batch))
            ran[one.task, one.micro_batch] = ran.get((one.task, one.micro_batch), 0) + 1
        elif isinstance(one, Send):
            value = (one.port, one.micro_batch)
            if value not in memory or (value, one.to) in sent:
                errors.append(f"{name}: {one} has no value, or is the second")
            sent.add((value, one.to))
        elif isinstance(one, Recv):
            if (one.port, one.micro_batch) in buffers:
                errors.append(f"{name}: {one} is the second")
            buffers[one.port, one.micro_batch] = False
        elif isinstance(one, Wait):
            value = (one.port, one.micro_batch)
            own = program.ports[one.port].group == name
            if ((value, one.peer) not in sent) if own else (value not in buffers):
                errors.append(f"{name}: {one} has nothing to wait for")
            if (value, one.peer) in waited:
                errors.append(f"{name}: {one} is the second")
            waited.add((value, one.peer))
            memory.add(value)
    errors += [f"{name}: {value} is never taken" for value, taken in buffers.items() if not taken]
    return errors


def _order_errors(name: str, run: Run, task: Task, history: list[tuple[Task, int]]) -> list[str]:
    """What a stage's saved values ask of the order."""
    kinds = {other.kind for other, m in history if other.stage == task.stage and m == run.micro_batch}
    missing = (task.kind in (TaskKind.BACKWARD, TaskKind.INPUT) and TaskKind.FORWARD not in kinds) or (
        task.kind is TaskKind.WEIGHT and TaskKind.INPUT not in kinds
    )
    return [f"{name}: {run} is out of order"] if missing else []
