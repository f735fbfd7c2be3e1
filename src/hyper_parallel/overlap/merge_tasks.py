"""Merges two tasks of pipeline stages by list scheduling, so that one computes while the other communicates.

Each task keeps the order of its nodes, so that it computes the same bits, and stops before each wait for a
collective. What lies between two stops is a turn:

    turn = [wait], kernels, and collectives that it begins

The turns of both tasks are two lanes of a list schedule (`overlap.list_scheduling`), with one compute queue and one
queue per axis that both share; of it, of turns that alternate, and of no merging, the shortest is taken. The order of
turns names no node: ranks with other shards have other sizes, and the same turns. Ranks of one mesh must have the same
order, since it is the order of their collectives; it depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.ir import group_of, is_collective, is_wait
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.overlap.list_scheduling import COMPUTE, FREE, Job, arrange, replayed

NodeSeconds = Callable[[fx.Node], float]
"""What a node takes alone."""


@dataclass(frozen=True)
class MergedTasks:
    """Two tasks that run as one."""

    turns: tuple[int, ...]
    """The task that runs at each turn, 0 or 1, from one of its stops to the next."""
    seconds: float
    """With every collective alone on its link."""
    apart: float
    """Seconds of the two tasks one after the other."""

    @property
    def hidden(self) -> float:
        """Seconds that merging them saves."""
        return self.apart - self.seconds


@dataclass(frozen=True)
class Task:
    """Nodes of a stage's graph that run as one task, in their order."""

    step: StepGraph
    nodes: Sequence[fx.Node]
    seconds: NodeSeconds


def merge_tasks(one: Task, other: Task, *, slowdown: float = 1.0) -> MergedTasks:
    """The order of turns in which two tasks, which do not depend on each other, take least time.

    `slowdown`: how many times as long a kernel takes beside a collective.
    """
    turns = {
        (lane, number): turn
        for lane, task in enumerate((one, other))
        for number, turn in enumerate(_turns(task))
    }
    serial = tuple(turns)
    alternating = tuple(sorted(serial, key=lambda turn: (turn[1], turn[0])))
    orders = (serial, _scheduled(turns), alternating)
    times = [_replayed(turns, order, slowdown) for order in orders]
    shortest = min(range(len(orders)), key=times.__getitem__)
    return MergedTasks(tuple(lane for lane, _ in orders[shortest]), times[shortest], times[0])


@dataclass(frozen=True)
class _Turn:
    """The part of a task between two stops."""

    waits: int | None
    """The number, in its task, of the collective that it begins with waiting for."""
    does: list[tuple[str, float]]
    """Kernels and collectives in order: queue and seconds."""


_TurnName = tuple[int, int]
"""Task, and the number of its turn."""


def _turns(task: Task) -> list[_Turn]:
    # The first turn is there also where it has nothing to do.
    turns = [_Turn(None, [])]
    number: dict[fx.Node, int] = {}
    for node in task.nodes:
        if is_wait(node):
            # Of a collective that a task before has begun, nothing is left to wait for.
            turns.append(_Turn(number.get(begun(node)), []))
        elif is_collective(node):
            number[node] = len(number)
            turns[-1].does.append((f"comm:{group_of(task.step, node).axis}", task.seconds(node)))
        elif seconds := task.seconds(node):
            turns[-1].does.append((COMPUTE, seconds))
    return turns


def _scheduled(turns: Mapping[_TurnName, _Turn]) -> tuple[_TurnName, ...]:
    """The order of turns by list scheduling, where the kernels between two collectives are one job."""
    whole = {name: _Turn(turn.waits, _merged(turn.does)) for name, turn in turns.items()}
    jobs, name_of = _jobs(whole, tuple(whole))
    return tuple(dict.fromkeys(name_of[job] for job in arrange(jobs, together=2).order))


def _merged(does: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Neighbouring kernels as one."""
    found: list[tuple[str, float]] = []
    for queue, seconds in does:
        if found and queue == found[-1][0] == COMPUTE:
            found[-1] = (COMPUTE, found[-1][1] + seconds)
        else:
            found.append((queue, seconds))
    return found


def _replayed(turns: Mapping[_TurnName, _Turn], order: Sequence[_TurnName], slowdown: float) -> float:
    """Seconds of an order, kernel by kernel: each that starts beside a collective is slowed down."""
    return replayed(_jobs(turns, order)[0], slowdown=slowdown).seconds


def _jobs(turns: Mapping[_TurnName, _Turn], order: Sequence[_TurnName]) -> tuple[list[Job], list[_TurnName]]:
    """The jobs of turns in an order, each behind the one before of its task; and the turn of each job."""
    jobs: list[Job] = []
    name_of: list[_TurnName] = []
    last: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    begun_at: dict[int, list[int]] = {0: [], 1: []}
    for name in order:
        lane = name[0]
        waits = turns[name].waits
        first = Job(0.0, FREE, waits=None if waits is None else begun_at[lane][waits])
        for job in (first, *(Job(seconds, queue) for queue, seconds in turns[name].does)):
            if job.queue not in (COMPUTE, FREE):
                begun_at[lane].append(len(jobs))
            jobs.append(replace(job, after=last[lane], lane=lane))
            last[lane] = (len(jobs) - 1,)
            name_of.append(name)
    return jobs, name_of
