"""When each action of a step runs whose micro-batches are of several kinds, and why ranks compute nothing.

As `timing` has it for micro-batches that are alike: a rank runs its actions in its order, each as soon as its inputs
are there. Transfers take their time and share nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.micro_batch_kinds import MicroBatchKind, StepTables
from hyper_parallel.schedule.timing import DeadlockError, Timing, bubble

_FORWARD, _INPUT, _WEIGHT = range(3)


def time_step(kinds: Sequence[MicroBatchKind], schedule: Schedule) -> Timing:
    """Start and end of each action of a complete schedule of all kinds' stages, as `step_schedule` numbers them.

    Raises StrategyError for a schedule of other stages, and DeadlockError where its orders wait in a circle.
    """
    tables = StepTables(kinds, schedule.ranks)
    if schedule.placement != tables.placement or schedule.micro_batches != tables.micro_batches:
        raise StrategyError(
            f"schedule {schedule.name} has {schedule.stages} stages and {schedule.micro_batches} micro-batches, and "
            f"the kinds have {len(tables.placement)} and {tables.micro_batches}"
        )
    walk = _Walk(tables, schedule)
    starts, ends = walk.run()
    makespan = max((one[-1] for one in ends if one), default=0.0)
    return Timing(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        makespan=makespan,
        bubbles=tuple(bubble(s, e, makespan) for s, e in zip(starts, ends, strict=True)),
        peaks=tuple(walk.peaks),
    )


class _Walk:
    """The longest path over orders and data flow."""

    def __init__(self, tables: StepTables, schedule: Schedule) -> None:
        self._tables, self._schedule = tables, schedule
        self._arrivals: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        """(pass, stage of its kind, micro-batch) to when each of its inputs was there."""
        self.peaks = [0.0] * schedule.ranks

    def run(self) -> tuple[list[list[float]], list[list[float]]]:
        """Starts and ends by rank."""
        orders = self._schedule.orders
        at, free, held = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
        starts: list[list[float]] = [[] for _ in orders]
        ends: list[list[float]] = [[] for _ in orders]
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                while at[rank] < len(order) and (ready := self._ready(order[at[rank]])) is not None:
                    action = order[at[rank]]
                    begin = max(free[rank], ready)
                    free[rank] = self._done(action, begin)
                    starts[rank].append(begin)
                    ends[rank].append(free[rank])
                    takes, frees = self._memory(action)
                    held[rank] += takes
                    self.peaks[rank] = max(self.peaks[rank], held[rank])
                    held[rank] -= frees
                    at[rank] += 1
                    moved = True
        stuck = [(rank, order[at[rank]]) for rank, order in enumerate(orders) if at[rank] < len(order)]
        if stuck:
            waits = "; ".join(f"rank {rank} at {action}" for rank, action in stuck[:4])
            raise DeadlockError(f"the step deadlocks: ranks wait for results that never come ({waits})")
        return starts, ends

    def _own(self, action: Action) -> tuple[MicroBatchKind, int]:
        number = self._tables.kind_of[action.micro_batch]
        return self._tables.kinds[number], action.stage - self._tables.first_stage[number]

    def _ready(self, action: Action) -> float | None:
        kind, stage = self._own(action)
        m = action.micro_batch
        if action.kind is TaskKind.FORWARD:
            code, needed = _FORWARD, sum(target == stage for _, target in kind.forward)
        elif action.kind is TaskKind.WEIGHT:
            code, needed = _WEIGHT, 1
        else:
            code, needed = _INPUT, 1 + sum(target == stage for _, target in kind.backward)
        there = self._arrivals[code, stage, m]
        return max(there, default=0.0) if len(there) == needed else None

    def _done(self, action: Action, begin: float) -> float:
        """The end of an action that begins; its results arrive."""
        kind, stage = self._own(action)
        costs, m = kind.costs, action.micro_batch
        if action.kind is TaskKind.WEIGHT:
            return begin + costs.weight[stage]
        ahead = action.kind is TaskKind.FORWARD
        end = begin + (costs.forward if ahead else costs.input)[stage]
        code, edges = (_FORWARD, kind.forward) if ahead else (_INPUT, kind.backward)
        for (source, target), seconds in edges.items():
            if source == stage:
                self._arrivals[code, target, m].append(end + seconds)
        self._arrivals[_INPUT if ahead else _WEIGHT, stage, m].append(end)
        return end + (costs.weight[stage] if action.kind is TaskKind.BACKWARD else 0.0)

    def _memory(self, action: Action) -> tuple[float, float]:
        """Bytes that an action takes when it begins, and frees when it ends."""
        kind, stage = self._own(action)
        saved, released = kind.costs.saved[stage], kind.costs.released[stage]
        match action.kind:
            case TaskKind.FORWARD:
                return saved, 0.0
            case TaskKind.INPUT:
                return max(0.0, -released), max(0.0, released)
            case TaskKind.WEIGHT:
                return 0.0, saved - released
        return max(0.0, -released), saved + max(0.0, -released)
