"""Deadlock check: run the instruction lists until nothing moves, and name the cycle of groups that wait.

Every condition that an instruction waits for (the other group has posted, has sent, has reached the Reduce) stays true
once it is true, and no instruction chooses. So the lists are a deterministic process network (Kahn 1974): if one order
of execution ends, every order ends, and one greedy run decides.

A group stands for all its ranks. The ranks' own waits map onto the groups' (a rank waits for its own previous
instruction, for ranks of a group that its group waits for, or for its fellows in a collective of a task), so what has
no cycle between groups has none between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.program.check_channels import Place, channels, reductions
from hyper_parallel.program.defects import Defect, DefectKind, shown
from hyper_parallel.program.instructions import Recv, Reduce, Send, Wait
from hyper_parallel.program.program import Program


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
    over: dict[tuple[str, str, str, int | None], list[tuple[str, int]]] = {}
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
    for by_group in reductions(program).values():
        for together in zip(*by_group.values(), strict=True):
            places = [(group, index) for group, (index, _) in zip(by_group, together, strict=True)]
            for place in places:
                conditions[place] = [other for other in places if other != place]
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
        what = _for(program, one, awaited, least)
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


def _for(program: Program, one: object, awaited: str, least: int) -> str:
    if isinstance(one, Reduce):
        return f"until {awaited} reaches its instruction {least}, {program.instructions[awaited][least]}"
    other = program.instructions[awaited][least - 1]
    verb = "posts" if isinstance(other, Recv) else "issues"
    return f"until {awaited} {verb} its instruction {least - 1}, {other}"


def _advice(program: Program, position: dict[str, int], path: list[str]) -> str:
    if any(isinstance(program.instructions[group][position[group]], Send) for group in path):
        return "  post one of these receives before its group sends or waits"
    return "  one of these has to come earlier in its group's list"
