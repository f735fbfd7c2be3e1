"""Programs for tests and benchmarks: schedules, stages with ports, random Programs and mutations that break them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.program import (
    DeviceGroup,
    Instruction,
    Port,
    Program,
    Recv,
    Run,
    Send,
    Task,
    TaskKind,
    Wait,
    to_program,
)
from hyper_parallel.schedule import Action, Schedule

Edges = Mapping[tuple[int, int], int]
"""(stage that gives, later stage that takes) to the number of ports."""
F, B, I, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.INPUT, TaskKind.WEIGHT  # noqa: E741


def chain(stages: int) -> dict[tuple[int, int], int]:
    """Each stage takes one port of the stage before."""
    return {(stage, stage + 1): 1 for stage in range(stages - 1)}


def groups_of(count: int, ranks: int = 1) -> list[DeviceGroup]:
    """Device groups of `ranks` ranks each, named ``g0``, ``g1``, ..."""
    return [
        DeviceGroup(Mesh(("shard", ranks)), tuple(range(i * ranks, (i + 1) * ranks)), f"g{i}")
        for i in range(count)
    ]


def stage_tasks(
    groups: Sequence[DeviceGroup],
    placement: Sequence[int],
    edges: Edges,
    *,
    shape: tuple[int, ...] = (4, 2),
) -> tuple[list[Task], list[Port]]:
    """Tasks of all kinds and ports for stages with these edges: what a forward task takes, its backward gives."""
    tasks: list[Task] = []
    ports: list[Port] = []
    layouts = [Layout.replicated(group.mesh, shape) for group in groups]

    def port(name: str, rank: int, taker: int) -> str:
        received = {groups[taker].name: layouts[taker]} if rank != taker else {}
        ports.append(Port(name, layouts[rank], "float32", groups[rank].name, received))
        return name

    gives: dict[int, list[str]] = {stage: [] for stage in range(len(placement))}
    takes: dict[int, list[str]] = {stage: [] for stage in range(len(placement))}
    for (source, target), count in edges.items():
        for index in range(count):
            name = port(f"x{source}-{target}.{index}", placement[source], placement[target])
            gives[source].append(name)
            takes[target].append(name)
    back_gives: dict[int, list[str]] = {stage: [] for stage in range(len(placement))}
    back_takes: dict[int, list[str]] = {stage: [] for stage in range(len(placement))}
    for (source, target), count in edges.items():
        for index in range(count):
            name = port(f"dx{source}-{target}.{index}", placement[target], placement[source])
            back_gives[target].append(name)
            back_takes[source].append(name)
    for stage, rank in enumerate(placement):
        group = groups[rank].name
        tasks += [
            Task(f"F{stage}", F, group, tuple(takes[stage]), tuple(gives[stage]), stage),
            Task(f"B{stage}", B, group, tuple(back_takes[stage]), tuple(back_gives[stage]), stage),
            Task(f"I{stage}", I, group, tuple(back_takes[stage]), tuple(back_gives[stage]), stage),
            Task(f"W{stage}", W, group, tuple(back_takes[stage]), (), stage),
        ]
    return tasks, ports


def program_of(
    schedule: Schedule,
    edges: Edges | None = None,
    *,
    ranks: int = 1,
    depth: int = 2,
) -> Program:
    """The Program of a schedule over groups of `ranks` ranks."""
    groups = groups_of(schedule.ranks, ranks)
    edges = chain(schedule.stages) if edges is None else edges
    tasks, ports = stage_tasks(groups, schedule.placement, edges)
    used = {(action.stage, action.kind) for order in schedule.orders for action in order}
    tasks = [task for task in tasks if (task.stage, task.kind) in used]
    given = {port for task in tasks for port in task.gives}
    ports = [port for port in ports if port.name in given]
    return to_program(schedule, groups, tasks, ports, depth=depth)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: each stage runs as many forward passes ahead as there are stages after it."""
    orders = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [Action(F, stage, m) for m in range(ahead)]
        for m in range(micro_batches):
            order.append(Action(B, stage, m))
            if m + ahead < micro_batches:
                order.append(Action(F, stage, m + ahead))
        orders.append(tuple(order))
    return Schedule("1F1B", tuple(range(stages)), tuple(orders), micro_batches)


def random_schedule(
    draw: random.Random, placement: Sequence[int], ranks: int, micro_batches: int, edges: Edges
) -> Schedule:
    """Any order that the data flow allows: in each step a random rank runs a random action that is ready."""
    whole = {(s, m): draw.random() < 0.6 for s in range(len(placement)) for m in range(micro_batches)}
    waiting = [Action(F, s, m) for s in range(len(placement)) for m in range(micro_batches)]
    for (stage, m), one in whole.items():
        waiting += [Action(B, stage, m)] if one else [Action(I, stage, m), Action(W, stage, m)]
    done: set[tuple[str, int, int]] = set()
    orders: list[list[Action]] = [[] for _ in range(ranks)]

    def ready(action: Action) -> bool:
        m, stage = action.micro_batch, action.stage
        if action.kind is F:
            return all(("forward", a, m) in done for a, b in edges if b == stage)
        if action.kind is W:
            return ("backward", stage, m) in done
        return ("forward", stage, m) in done and all(
            ("backward", b, m) in done for a, b in edges if a == stage
        )

    while waiting:
        action = draw.choice([one for one in waiting if ready(one)])
        waiting.remove(action)
        if action.kind is not W:
            done.add(("forward" if action.kind is F else "backward", action.stage, action.micro_batch))
        orders[placement[action.stage]].append(action)
    return Schedule("random", tuple(placement), tuple(map(tuple, orders)), micro_batches)


def random_program(draw: random.Random, most_ranks: int = 4, most_micro_batches: int = 3) -> Program:
    """Random stages, placement, data flow, order and depth. Every one is right."""
    ranks = draw.randint(2, most_ranks)
    stages = draw.randint(ranks, min(ranks + 2, 6))
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    edges = dict.fromkeys(chain(stages), 1)
    for _ in range(draw.randint(0, 2)):
        source = draw.randrange(stages - 1)
        target = draw.randint(source + 1, stages - 1)
        edges[source, target] = edges.get((source, target), 0) + 1
    schedule = random_schedule(draw, placement, ranks, draw.randint(1, most_micro_batches), edges)
    return program_of(schedule, edges, depth=draw.randint(1, 3))


def mutate(draw: random.Random, program: Program) -> Program:
    """The Program with one instruction of one group dropped, doubled or moved, or two swapped."""
    group = draw.choice([name for name, order in program.instructions.items() if len(order) > 1])
    order = list(program.instructions[group])
    kind = draw.choice(("drop", "double", "move", "swap"))
    index = draw.randrange(len(order))
    if kind == "drop":
        del order[index]
    elif kind == "double":
        order.insert(draw.randrange(len(order) + 1), order[index])
    elif kind == "move":
        order.insert(draw.randrange(len(order)), order.pop(index))
    else:
        other = draw.randrange(len(order))
        order[index], order[other] = order[other], order[index]
    return replace(program, instructions={**program.instructions, group: tuple(order)})


def postpone(draw: random.Random, program: Program) -> Program:
    """The Program with some receives posted, and some sends issued, as late as its own group can do.

    The orders of channels and the flow of values stay right, so what breaks is progress alone: deferred receives are
    what hung torch.distributed.pipelining on two nodes (pytorch 172668).
    """
    lists = dict(program.instructions)
    share = draw.choice((0.2, 0.6, 1.0))
    kinds = draw.choice(((Recv,), (Recv,), (Send,), (Send, Recv)))
    for group in draw.sample(list(lists), draw.randint(1, len(lists))):
        order = list(lists[group])
        for index in reversed(range(len(order))):
            one = order[index]
            if isinstance(one, kinds) and draw.random() < share:
                order.pop(index)
                end = next((i for i in range(index, len(order)) if _follows(one, order[i])), len(order))
                at = end if isinstance(one, Recv) else draw.randint(index, end)
                order.insert(at, one)
        lists[group] = tuple(order)
    return replace(program, instructions=lists)


def _follows(one: Instruction, other: Instruction) -> bool:
    """Whether `other` has to stay behind `one`: the next transfer of the channel, its own Wait."""
    if isinstance(other, Run):
        return False
    if isinstance(other, type(one)):
        return _peer(one) == _peer(other)
    return isinstance(other, Wait) and (other.port, other.micro_batch, other.peer) == (
        one.port,
        one.micro_batch,
        _peer(one),
    )


def _peer(one: Instruction) -> str:
    return one.to if isinstance(one, Send) else one.source if isinstance(one, Recv) else ""


def broken_program(draw: random.Random, program: Program) -> Program:
    """A Program that differs from the given one; most such are broken, half of them in progress alone."""
    mutant = program
    while mutant == program:
        mutant = program
        if draw.random() < 0.5:
            mutant = postpone(draw, mutant)
        else:
            for _ in range(draw.randint(1, 3)):
                mutant = mutate(draw, mutant)
    return mutant
