"""Pairs of a schedule: a forward pass that runs together with the backward pass of another micro-batch.

DeepSeek-AI, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, section 3.2.1 (DualPipe), pairs them so that each
computes while the other one communicates. Here any schedule is given pairs: neighbours in a rank's order, a forward
pass and a backward pass or its INPUT half, of two micro-batches. A pair needs both inputs before it starts and gives
both results at its end, so that it can make other ranks wait longer than it saves, or wait in a circle. Several sets of
pairs are timed (`time_schedule`), and the shortest step wins:

    all neighbours       with the forward pass first, with it second, with either, from the front
    the same, less       pairs that delay one of the two by more than they hide, in the schedule without pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.timing import DeadlockError, Timing, time_schedule

_BACKWARD = (TaskKind.BACKWARD, TaskKind.INPUT)
_PAYS = 1 - 1e-9
"""Of the step without pairs, what a step with pairs takes at most."""


def with_pairs(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with the pairs that make its step shortest; without any where none makes it shorter."""
    plain = time_schedule(schedule, costs)
    best, shortest = schedule, plain.makespan * _PAYS
    for pairs in _candidates(schedule, costs, plain):
        paired = replace(schedule, pairs=pairs)
        try:
            makespan = time_schedule(paired, costs).makespan
        except DeadlockError:
            continue
        if makespan < shortest:
            best, shortest = paired, makespan
    return best


def with_steady_pairs(schedule: Schedule) -> Schedule:
    """The schedule with the pairs that make its step shortest where all passes take as long, and a pair hides half of a
    pass: for costs that tell little of what collectives take."""
    stages = schedule.stages
    return with_pairs(schedule, replace(Costs.even(stages), hidden=((0.5,) * stages,) * stages))


def stages_of_pair(one: Action, other: Action) -> tuple[int, int]:
    """The stages of its forward pass and of its backward pass."""
    if one.kind is not TaskKind.FORWARD:
        one, other = other, one
    return one.stage, other.stage


def pairs_of_stages(schedule: Schedule) -> list[tuple[int, int]]:
    """The stages of each different pair of a schedule, ascending."""
    return sorted(
        {
            stages_of_pair(*order[at : at + 2])
            for rank, order in enumerate(schedule.orders)
            for at in schedule.pairs_of(rank)
        }
    )


def _candidates(schedule: Schedule, costs: Costs, plain: Timing) -> Iterator[tuple[tuple[int, ...], ...]]:
    ready = _ready(schedule, costs, plain)
    for forward in (True, False, None):
        for quick in (False, True):
            found = []
            for rank, order in enumerate(schedule.orders):
                places: list[int] = []
                for at in range(len(order) - 1):
                    one, other = order[at], order[at + 1]
                    first = one.kind is TaskKind.FORWARD
                    if (places and places[-1] == at - 1) or not _may_pair(one, other):
                        continue
                    if forward is not None and first is not forward:
                        continue
                    late = ready[rank][at + 1] - plain.starts[rank][at]
                    split = TaskKind.INPUT in (one.kind, other.kind)
                    hidden = costs.hides(*stages_of_pair(one, other), split=split)
                    if not hidden or (quick and late > hidden):
                        continue
                    places.append(at)
                found.append(tuple(places))
            if any(found):
                yield tuple(found)


def _may_pair(one: Action, other: Action) -> bool:
    kinds = (one.kind, other.kind)
    forward = TaskKind.FORWARD in kinds and any(kind in _BACKWARD for kind in kinds)
    return forward and one.micro_batch != other.micro_batch


def _ready(schedule: Schedule, costs: Costs, plain: Timing) -> list[list[float]]:
    """When the input of each action is there, by rank, in the schedule without pairs."""
    ends: dict[tuple[bool, int, int], float] = {}
    for rank, order in enumerate(schedule.orders):
        for action, end in zip(order, plain.ends[rank], strict=True):
            if action.kind is not TaskKind.WEIGHT:
                ends[action.kind is TaskKind.FORWARD, action.stage, action.micro_batch] = end
    last = schedule.stages - 1

    def ready(action: Action) -> float:
        forward, stage, m = action.kind is TaskKind.FORWARD, action.stage, action.micro_batch
        if action.kind is TaskKind.WEIGHT:
            return ends[False, stage, m]
        if forward:
            source, border = (True, stage - 1, m), stage - 1
        elif stage == last:
            return ends[True, stage, m]
        else:
            source, border = (False, stage + 1, m), stage
        if border < 0:
            return 0.0
        apart = schedule.placement[source[1]] != schedule.placement[stage]
        return ends[source] + (costs.transfers[border] if apart else 0.0)

    return [[ready(action) for action in order] for order in schedule.orders]
