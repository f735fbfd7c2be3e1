"""The order of a step whose micro-batches are of several kinds, made from what they cost, within milliseconds.

List scheduling (as in `list_scheduling`) of one sequence of micro-batches on all ranks. Every rank begins forward
passes in the order of the sequence, so that the oldest micro-batch that has not ended always has its memory, and no cap
can lock the ranks. Backward passes run as their gradients arrive; gradients of weights where nothing else can run.

Candidates; the shortest wins: sequences times rules. Sequences: kinds mixed evenly, by Johnson's rule
(*Optimal two- and three-stage production schedules*, Naval Research Logistics Quarterly 1(1), 1954) with the last stage
as the second machine, kind by kind, and Johnson's from the end. Rules: backward passes first, or forward passes first
where memory has room. The search counts actions, not seconds, and depends on its arguments alone, so that ranks with
the same arguments have the same order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.micro_batch_kinds import MicroBatchKind, StepTables, way_in

EFFORT = 1_600
"""Actions placed, of which the first candidate takes as many as it has."""
_NEAR = 1e-6
"""Relative distance to the lower bound at which the search ends."""
_RULES = ("backward passes first", "forward passes first")
_FORWARD, _INPUT, _WEIGHT, _BACKWARD = range(4)
_KINDS = (TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT, TaskKind.BACKWARD)


@dataclass(frozen=True)
class StepSchedule:
    """The result of the search."""

    schedule: Schedule
    """Its stages are those of all kinds, kind after kind; micro-batches are numbered likewise."""
    makespan: float
    bound: float
    """No order takes less."""
    source: str
    """The candidate that won."""


def step_schedule(
    kinds: Sequence[MicroBatchKind],
    ranks: int,
    caps: Sequence[float] | None = None,
    *,
    effort: int = EFFORT,
) -> StepSchedule:
    """A short schedule of all micro-batches of a step.

    `caps`: most that each rank may hold of what forward passes save, but at least one micro-batch; as much as 1F1B
    would hold on its fullest rank when left out. Raises StrategyError for kinds that name other ranks.
    """
    if not kinds or any(not 0 <= rank < ranks for kind in kinds for rank in kind.placement):
        raise StrategyError(
            f"a step of {len(kinds)} kinds of micro-batches on {ranks} ranks; name ranks below {ranks}"
        )
    tables = StepTables(kinds, ranks)
    problem = _Problem(tables, tables.caps_of_1f1b() if caps is None else caps)
    bound, best, source = tables.bound(), _Listed(math.inf, []), ""
    sequences = list(_sequences(tables))
    candidates = [(one, rule) for pair in (sequences[:2], sequences[2:]) for rule in _RULES for one in pair]
    for (name, sequence), rule in candidates:
        if best.makespan <= bound * (1 + _NEAR) or (source and effort < problem.actions):
            break
        effort -= problem.actions
        found = problem.listed(sequence, forward_first=rule.startswith("forward"))
        if found.makespan < best.makespan * (1 - 1e-12):
            best, source = found, f"{name}, {rule}"
    return StepSchedule(_written(tables, best.orders), best.makespan, bound, source)


@dataclass(frozen=True)
class _Listed:
    makespan: float
    orders: list[list[tuple[int, int]]]
    """By rank: (what it computes, micro-batch)."""


class _Problem:
    """Tables that list scheduling looks into, [rank][micro-batch]."""

    def __init__(self, tables: StepTables, caps: Sequence[float]) -> None:
        self.tables, self.caps = tables, [cap * (1 + 1e-9) for cap in caps]
        self.actions = sum(kind.count * kind.costs.stages * 3 for kind in tables.kinds)
        rows = [row for kind in tables.kinds for row in self._rows(kind)]
        first = tables.first_stage
        self.rows = [
            [_NOWHERE if stage < 0 else rows[first[tables.kind_of[m]] + stage] for m, stage in enumerate(own)]
            for own in tables.stage
        ]

    @staticmethod
    def _rows(kind: MicroBatchKind) -> Iterator[_Row]:
        """By stage."""
        costs, place = kind.costs, kind.placement
        ahead: list[list[tuple[int, float]]] = [[] for _ in place]
        back: list[list[tuple[int, float]]] = [[] for _ in place]
        inputs, gradients = [0] * len(place), [0] * len(place)
        for edges, gives, waits in ((kind.forward, ahead, inputs), (kind.backward, back, gradients)):
            for (source, target), seconds in edges.items():
                gives[source].append((place[target], seconds))
                waits[target] += 1
        for stage in range(len(place)):
            yield _Row(
                costs.forward[stage],
                costs.input[stage],
                costs.weight[stage],
                costs.saved[stage] + max(0.0, -costs.released[stage]),
                max(0.0, costs.released[stage]),
                ahead[stage],
                back[stage],
                inputs[stage],
                gradients[stage],
            )

    def listed(self, sequence: Sequence[int], *, forward_first: bool) -> _Listed:
        """The list schedule of a sequence of all micro-batches."""
        rows, caps, ranks = self.rows, self.caps, self.tables.ranks
        count = len(sequence)
        turn = [0] * count
        for at, m in enumerate(sequence):
            turn[m] = at
        ahead = [[m for m in sequence if own[m] is not _NOWHERE] for own in rows]
        missing = [[one.inputs for one in own] for own in rows]
        owed = [[one.gradients + 1 for one in own] for own in rows]
        """Gradients that a backward pass still waits for, and its own forward pass."""
        next_ahead, held, busy = [0] * ranks, [0.0] * ranks, [False] * ranks
        back: list[list[int]] = [[] for _ in range(ranks)]
        weights: list[list[int]] = [[] for _ in range(ranks)]
        orders: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        events: list[tuple[float, int, int, int]] = [(0.0, rank, -1, 0) for rank in range(ranks)]
        push, pop = heapq.heappush, heapq.heappop
        makespan = 0.0
        while events:
            now, rank, code, m = pop(events)
            if code == _FORWARD:
                missing[rank][m] -= 1
            elif code == _INPUT:
                owed[rank][m] -= 1
                if not owed[rank][m]:
                    push(back[rank], turn[m])
            else:
                busy[rank] = False
            if busy[rank]:
                continue
            own, at, may = rows[rank], next_ahead[rank], -1
            if at < len(ahead[rank]):
                m = ahead[rank][at]
                if not missing[rank][m] and (not held[rank] or held[rank] + own[m].takes <= caps[rank]):
                    may = m
            if back[rank] and (may < 0 or not forward_first):
                code, m = _INPUT, sequence[pop(back[rank])]
            elif may >= 0:
                code, m = _FORWARD, may
            elif weights[rank]:
                code, m = _WEIGHT, weights[rank].pop(0)
            else:
                continue
            one = own[m]
            if code == _FORWARD:
                next_ahead[rank] = at + 1
                held[rank] += one.takes
                end = now + one.forward
                for other, seconds in one.ahead:
                    push(events, (end + seconds, other, _FORWARD, m))
                owed[rank][m] -= 1
                if not owed[rank][m]:
                    push(back[rank], turn[m])
            elif code == _INPUT:
                end = now + one.input
                held[rank] -= one.frees
                for other, seconds in one.back:
                    push(events, (end + seconds, other, _INPUT, m))
                if one.back:
                    weights[rank].append(m)
                else:
                    # Nobody waits for the first half: the pass is whole.
                    code, end = _BACKWARD, end + one.weight
                    held[rank] -= one.takes - one.frees
            else:
                end = now + one.weight
                held[rank] -= one.takes - one.frees
            orders[rank].append((code, m))
            busy[rank] = True
            push(events, (end, rank, -1, m))
            if end > makespan:
                makespan = end
        return _Listed(makespan, orders)


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage of a micro-batch."""

    forward: float
    input: float
    weight: float
    takes: float
    """Bytes at the start of the forward pass."""
    frees: float
    """Of them, at the end of the input gradients; the others at that of the weights' gradients."""
    ahead: list[tuple[int, float]]
    """Ranks that take what the forward pass gives, and the seconds of the transfer."""
    back: list[tuple[int, float]]
    inputs: int
    """Values that the forward pass waits for."""
    gradients: int


_NOWHERE = _Row(0.0, 0.0, 0.0, 0.0, 0.0, [], [], 0, 0)
"""Of a micro-batch that has no stage on a rank."""


def _sequences(tables: StepTables) -> Iterator[tuple[str, list[int]]]:
    """Sequences of micro-batches, the most useful first."""
    numbers = [
        [m for m, kind in enumerate(tables.kind_of) if kind == number] for number in range(len(tables.kinds))
    ]
    shares = [(at + 0.5) / len(own) for own in numbers for at in range(len(own))]
    before = [way_in(kind)[-1] for kind in tables.kinds]
    after = [kind.work(kind.costs.stages - 1) for kind in tables.kinds]
    kinds = range(len(tables.kinds))
    soon = sorted((k for k in kinds if before[k] <= after[k]), key=lambda k: (before[k], -after[k]))
    late = sorted((k for k in kinds if before[k] > after[k]), key=lambda k: (-after[k], before[k]))
    johnson = [m for k in (*soon, *late) for m in numbers[k]]
    if len(tables.kinds) == 1:
        yield "one kind", johnson
        return
    yield "mixed", sorted(range(tables.micro_batches), key=lambda m: (shares[m], m))
    yield "Johnson's rule", johnson
    yield "kind by kind", list(range(tables.micro_batches))
    yield "Johnson's rule from the end", johnson[::-1]


def _written(tables: StepTables, orders: Sequence[Sequence[tuple[int, int]]]) -> Schedule:
    """As a schedule of the stages of all kinds; the halves of a backward pass that follow each other are one."""
    made = []
    for rank, order in enumerate(orders):
        actions: list[Action] = []
        for code, m in order:
            stage = tables.first_stage[tables.kind_of[m]] + tables.stage[rank][m]
            before = actions[-1] if actions else None
            if code == _WEIGHT and before == Action(TaskKind.INPUT, stage, m):
                actions[-1] = Action(TaskKind.BACKWARD, stage, m)
            else:
                actions.append(Action(_KINDS[code], stage, m))
        made.append(tuple(actions))
    return Schedule("step", tables.placement, tuple(made), tables.micro_batches)
