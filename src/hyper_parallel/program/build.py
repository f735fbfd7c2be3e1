"""Pipeline schedules as data, and the Program of a schedule and the data flow between its tasks.

The actions are executed once in thought, in rounds: in each round every group runs its next action if the values that
it takes are there. A pair of actions is one action, which takes and gives what both do. This gives one order of
everything that happens. A transfer is written into both lists at the moment when its value is given: the Recv at the
place where the receiving group stands, then the Send. So in that order every Send comes after its Recv, and no Send of
the Program can block for ever: it is free of deadlocks by construction, also under rendezvous sends, and the sends and
receives of each channel are in one order.

Receives are then posted earlier (`post_ahead`), which can only let a Send return sooner.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program.program import (
    Instruction,
    Port,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    Task,
    TaskKind,
    Value,
    Wait,
)


@dataclass(frozen=True, slots=True)
class Action:
    """One task of one stage on one micro-batch."""

    kind: TaskKind
    """FORWARD, BACKWARD, or its halves INPUT and WEIGHT."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """``F3.1``: the forward pass of micro-batch 1 in stage 3; B, I and W are the backward pass and its halves."""
        return f"{self.kind.value[0].upper()}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Orders of actions. A rank of the schedule is a device group of the run: all its ranks do the same."""

    name: str
    placement: tuple[int, ...]
    """Stage to the rank that it lies on."""
    orders: tuple[tuple[Action, ...], ...]
    """By rank."""
    micro_batches: int
    pairs: tuple[tuple[int, ...], ...] = ()
    """By rank: places in its order whose action runs together with the next one, a forward pass with the backward pass
    (or its INPUT half) of another micro-batch. None when left out."""

    def pairs_of(self, rank: int) -> frozenset[int]:
        """The places of a rank's pairs."""
        return frozenset(self.pairs[rank]) if self.pairs else frozenset()

    def units(self, rank: int) -> list[tuple[Action, ...]]:
        """A rank's order with what runs together in one place: an action, or a pair."""
        order, pairs = self.orders[rank], self.pairs_of(rank)
        return [order[at : at + 1 + (at in pairs)] for at in range(len(order)) if at - 1 not in pairs]

    @property
    def stages(self) -> int:
        """Number of stages of all ranks together."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)


Flow = tuple[tuple[str, ...], tuple[str, ...]]
"""What a task takes and what it gives, by port."""


def stage_tasks(
    number: int, group: str, forward: Flow, backward: Flow, micro_batches: tuple[int, ...] | None = None
) -> list[Task]:
    """The tasks of a stage, of all kinds. `micro_batches`: those that have the stage; all when left out."""
    flows = {
        TaskKind.FORWARD: forward,
        TaskKind.BACKWARD: backward,
        TaskKind.INPUT: backward,
        TaskKind.WEIGHT: ((), ()),
    }
    return [
        Task(f"{kind} {number}", kind, group, takes, gives, stage=number, micro_batches=micro_batches)
        for kind, (takes, gives) in flows.items()
    ]


_Unit = tuple[tuple[Task, int], ...]
"""Tasks and their micro-batches: one, or a pair that runs as one."""


def to_program(
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    tasks: Iterable[Task],
    ports: Iterable[Port],
    *,
    depth: int = 2,
) -> Program:
    """The Program of a schedule: tasks in its order, with transfers between groups inserted from the data flow.

    Args:
        schedule: the order of actions of each of its ranks.
        groups: by rank of the schedule.
        tasks: for each stage its tasks of each kind that the schedule names.
        ports: what the tasks take and give. A stage may take ports of any other stage. Stages of one group share
            values in memory; every other group that takes a value gets it once.
        depth: receives of one port that are posted and not yet waited for, and sends of one port to one group that
            hold their buffer. More lets groups run further apart, and takes more memory.

    Raises ProgramError when the schedule names a task that is missing, or runs actions in an order in which each
    waits for another.
    """
    builder = _Builder(
        schedule, groups, {task.name: task for task in tasks}, {one.name: one for one in ports}, depth
    )
    builder.actions()
    lists = {group: tuple(post_ahead(order, depth)) for group, order in builder.lists.items()}
    named = {group.name: group for group in groups}
    return Program(named, builder.tasks, builder.ports, lists, schedule.micro_batches)


class _Builder:
    """The instruction lists as they grow."""

    def __init__(
        self,
        schedule: Schedule,
        groups: Sequence[DeviceGroup],
        tasks: Mapping[str, Task],
        ports: Mapping[str, Port],
        depth: int,
    ) -> None:
        if depth < 1:
            raise ProgramError(f"depth is {depth}; a group needs room for at least one receive of each port")
        if len(groups) != schedule.ranks:
            raise ProgramError(
                f"schedule {schedule.name} has {schedule.ranks} ranks, and {len(groups)} groups are given"
            )
        self.schedule, self.tasks, self.ports, self.depth = schedule, tasks, ports, depth
        self.names = [group.name for group in groups]
        self.lists: dict[str, list[Instruction]] = {name: [] for name in self.names}
        self.present: dict[str, set[Value]] = {name: set() for name in self.names}
        self.arriving: dict[str, dict[Value, str]] = {name: {} for name in self.names}
        self.in_flight: dict[tuple[str, str, str], list[Wait]] = {}
        stages = {(task.stage, task.kind): task for task in tasks.values()}
        self.orders = [
            [
                tuple((self._task(stages, action, name), action.micro_batch) for action in unit)
                for unit in schedule.units(rank)
            ]
            for rank, name in enumerate(self.names)
        ]
        """By rank: what it runs, an action or a pair of them at a time."""
        self.takers = self._takers()

    def _task(self, stages: Mapping[tuple[int | None, TaskKind], Task], action: Action, group: str) -> Task:
        task = stages.get((action.stage, action.kind))
        if task is None:
            raise ProgramError(
                f"{self.schedule.name} runs {action}, and stage {action.stage} has no {action.kind} task"
            )
        if task.group != group:
            raise ProgramError(
                f"{self.schedule.name} runs {action} on {group}, and {task.name!r} is on {task.group}"
            )
        return task

    def _takers(self) -> dict[Value, list[str]]:
        """The groups that take each value and do not compute it, in order of the schedule's ranks."""
        takers: dict[Value, list[str]] = {}
        for name, order in zip(self.names, self.orders, strict=True):
            for task, micro_batch in (run for unit in order for run in unit):
                for port in task.takes:
                    if self._computed_by(port) == name:
                        continue
                    groups = takers.setdefault((port, micro_batch), [])
                    if name not in groups:
                        groups.append(name)
        return takers

    def _computed_by(self, port: str) -> str:
        if port not in self.ports:
            raise ProgramError(f"a task takes port {port!r}, which is not among the ports")
        return self.ports[port].group

    def actions(self) -> None:
        """All actions in rounds, each with the transfers of what it gives."""
        position = [0] * len(self.names)
        while any(at < len(order) for at, order in zip(position, self.orders, strict=True)):
            # Decided for all groups before any runs: what a round gives is taken in the next one.
            able = [
                rank
                for rank, order in enumerate(self.orders)
                if position[rank] < len(order) and not self._absent(rank, order[position[rank]])
            ]
            if not able:
                raise ProgramError(self._blocked(position))
            # A schedule may need more receives posted than `depth`; then one group at a time goes beyond it.
            ready = [rank for rank in able if self._has_room(self.orders[rank][position[rank]])] or able[:1]
            for rank in ready:
                self._run(self.names[rank], self.orders[rank][position[rank]])
            # After all tasks of the round, so that a receive stands behind what its group runs meanwhile.
            for rank in ready:
                for task, micro_batch in self.orders[rank][position[rank]]:
                    self._give(self.names[rank], task, micro_batch)
                position[rank] += 1
        # The waits for sends that still hold buffers.
        for (source, _, _), waits in self.in_flight.items():
            self.lists[source] += waits

    def _has_room(self, unit: _Unit) -> bool:
        """Whether each group that takes what the tasks give may post one more receive of the port."""
        return all(
            sum(port == name for name, _ in self.arriving[taker]) < self.depth
            for task, micro_batch in unit
            for port in task.gives
            for taker in self.takers.get((port, micro_batch), ())
        )

    def _absent(self, rank: int, unit: _Unit) -> list[Value]:
        name = self.names[rank]
        values = [(port, micro_batch) for task, micro_batch in unit for port in task.takes]
        return [
            value for value in values if value not in self.present[name] and value not in self.arriving[name]
        ]

    def _run(self, name: str, unit: _Unit) -> None:
        instructions = self.lists[name]
        for task, micro_batch in unit:
            for port in task.takes:
                source = self.arriving[name].pop((port, micro_batch), None)
                if source is not None:
                    instructions.append(Wait(port, micro_batch, source))
                    self.present[name].add((port, micro_batch))
        runs = {task.kind: Run(task.name, micro_batch) for task, micro_batch in unit}
        if len(runs) == 1:
            instructions += runs.values()
        else:
            forward = runs.pop(TaskKind.FORWARD)
            (backward,) = runs.values()
            instructions.append(RunPair(forward, backward))

    def _give(self, name: str, task: Task, micro_batch: int) -> None:
        for port in task.gives:
            self.present[name].add((port, micro_batch))
            for taker in self.takers.get((port, micro_batch), ()):
                self._transfer(port, micro_batch, name, taker)

    def _transfer(self, port: str, micro_batch: int, source: str, target: str) -> None:
        self.lists[target].append(Recv(port, micro_batch, source))
        self.arriving[target][port, micro_batch] = source
        in_flight = self.in_flight.setdefault((source, target, port), [])
        if len(in_flight) == self.depth:
            self.lists[source].append(in_flight.pop(0))
        self.lists[source].append(Send(port, micro_batch, target))
        in_flight.append(Wait(port, micro_batch, target))

    def _blocked(self, position: Sequence[int]) -> str:
        lines = [
            f"schedule {self.schedule.name} cannot run: each next action waits for a value that is not given"
        ]
        for rank, order in enumerate(self.orders):
            if position[rank] < len(order):
                actions = " with ".join(map(str, self.schedule.units(rank)[position[rank]]))
                values = ", ".join(f"{port!r}" for port, _ in self._absent(rank, order[position[rank]]))
                lines.append(f"  {self.names[rank]} stands at {actions} and waits for {values}")
        return "\n".join(lines)


def post_ahead(instructions: Sequence[Instruction], depth: int) -> list[Instruction]:
    """The same instructions, with each Recv as early as possible.

    Receives from one group stay in their order. A Recv moves ahead while fewer than `depth` receives of its port are
    posted and not waited for; it never moves back, so it may exceed the bound where it stood already. A Recv does not
    block: posted earlier, it lets the other group's Send return sooner and delays nothing.
    """
    fixed: list[Instruction] = []
    queues: dict[str, deque[tuple[int, Recv]]] = {}
    for one in instructions:
        if isinstance(one, Recv):
            queues.setdefault(one.source, deque()).append((len(fixed), one))
        else:
            fixed.append(one)
    moved: list[Instruction] = []
    posted: Counter[str] = Counter()
    received: set[tuple[str, int, str]] = set()

    def post(index: int) -> None:
        ready: list[tuple[int, Recv]] = []
        for queue in queues.values():
            while queue and (queue[0][0] <= index or posted[queue[0][1].port] < depth):
                ready.append(queue.popleft())
                posted[ready[-1][1].port] += 1
        for _, one in sorted(ready, key=lambda pair: pair[0]):
            received.add((one.port, one.micro_batch, one.source))
            moved.append(one)

    for index, one in enumerate(fixed):
        post(index)
        moved.append(one)
        if isinstance(one, Wait) and (one.port, one.micro_batch, one.peer) in received:
            posted[one.port] -= 1
    post(len(fixed))
    return moved
