"""Pairs of a pipeline's tasks: a forward pass merged with another one's gradients of inputs (`overlap.merge_tasks`).

What follows in a backward pass, the gradients of weights, is no part of the pair, since what goes back is sent before;
but where nothing goes back, in the first stage, it is (`runtime.interpreter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hyper_parallel.graph.stage_cut import NodeCost
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.overlap.merge_tasks import MergedTasks, Task, merge_tasks
from hyper_parallel.runtime.stage_costs import parts_of

StagePair = tuple[int, int]
"""Stage of the forward pass, stage of the backward pass."""


def pairs_on_one_rank(stages: int, ranks: int) -> list[StagePair]:
    """The pairs of stages that some schedule has on one rank: neighbours, interleaved ones, or the ends of a V."""
    parts = stages // ranks

    def together(one: int, other: int) -> bool:
        return (
            one // parts == other // parts
            or one % ranks == other % ranks
            or (one + other) % (2 * ranks) == 2 * ranks - 1
        )

    return [(one, other) for one in range(stages) for other in range(stages) if together(one, other)]


def merged_pairs(
    stages: Sequence[Stage], costs: Sequence[NodeCost], pairs: Iterable[StagePair], slowdown: float = 1.0
) -> dict[StagePair, MergedTasks]:
    """The merged tasks of pairs of these stages. `costs`: of each stage's nodes; `slowdown`: as of `merge_tasks`."""
    tasks = []
    for stage, cost in zip(stages, costs, strict=True):
        forward, before, after = parts_of(stage)
        back = before if stage.gradients_out else [*before, *after]
        tasks.append((Task(stage.step, forward, cost), Task(stage.step, back, cost)))
    return {
        (ahead, back): merge_tasks(tasks[ahead][0], tasks[back][1], slowdown=slowdown)
        for ahead, back in pairs
    }


def hidden_matrix(stages: int, merged: Mapping[StagePair, MergedTasks]) -> tuple[tuple[float, ...], ...]:
    """What each pair hides, [forward stage][backward stage], as `schedule.Costs` takes it."""
    return tuple(
        tuple(merged[one, other].hidden if (one, other) in merged else 0.0 for other in range(stages))
        for one in range(stages)
    )
