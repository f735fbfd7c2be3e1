"""A second, slow implementation of a schedule's times: repeated relaxation until nothing moves."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import Action, Costs, Schedule

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT


def seconds_of(action: Action, costs: Costs) -> float:
    times = {F: costs.forward, B: costs.backward, TaskKind.INPUT: costs.input, W: costs.weight}
    return times[action.kind][action.stage]


def needs(action: Action, stages: int) -> list[Action]:
    """Actions any of which gives what the action waits for."""
    s, m = action.stage, action.micro_batch
    if action.kind is F:
        return [Action(F, s - 1, m)] if s else []
    if action.kind is W:
        return [Action(TaskKind.INPUT, s, m)]
    return [Action(F, s, m)] if s + 1 == stages else [Action(B, s + 1, m), Action(TaskKind.INPUT, s + 1, m)]


def reference_ends(
    schedule: Schedule, costs: Costs, fused: Callable[[Action, Action], bool] = lambda first, second: False
) -> dict[Action, float]:
    """When each action's result is there on its rank. Actions that `fused` pairs with the next one give their results
    when both have ended, and begin when the inputs of both are there."""
    result = {action: 0.0 for order in schedule.orders for action in order}
    moved = True
    while moved:
        moved = False
        for order in schedule.orders:
            now, at = 0.0, 0
            while at < len(order):
                pair = at + 1 < len(order) and fused(order[at], order[at + 1])
                together = order[at : at + 1 + pair]
                for action in together:
                    for source in needs(action, schedule.stages):
                        if source not in result or source in together:
                            continue
                        arrival = result[source]
                        if schedule.placement[source.stage] != schedule.placement[action.stage]:
                            arrival += costs.transfers[min(source.stage, action.stage)]
                        now = max(now, arrival)
                now += sum(seconds_of(action, costs) for action in together)
                for action in together:
                    if result[action] < now:
                        result[action] = now
                        moved = True
                at += len(together)
    return result
