"""Two tasks merged: each in its own order, one order of collectives on all ranks, and no longer than apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from harness.pipeline_steps import settings_of
from harness.pipelines import Captured, even_cut
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.ir import group_of, is_collective, is_wait
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.graph.stage_graph import Stage, partition
from hyper_parallel.overlap.merge_tasks import MergedTasks, Task, merge_tasks
from hyper_parallel.runtime.stage_costs import parts_of

CASES: dict[str, tuple[Mapping[str, Any], dict[str, int]]] = {
    "tensor": (settings_of("gemma2", 3), {"tensor": 2}),
    "experts": (settings_of("mixtral", 2), {"shard": 2, "expert": 2}),
}


@functools.cache
def _stages(case: str, rank: int) -> tuple[Stage, ...]:
    family, axes = CASES[case]
    with fake_ranks(2, rank):
        found = Captured(family, {"axes": axes, "check": False})
        return partition(found.step, by_modules(even_cut(found.model, 2, "model.layers")), 2).stages


_needs = functools.cache(dependencies)


def _tasks(case: str, rank: int, ahead: int, back: int, costly: float = 1.0) -> tuple[Task, Task]:
    stages = _stages(case, rank)

    def task(stage: int, part: int) -> Task:
        step = stages[stage].step
        cost = flops_cost(step)

        def seconds(node: fx.Node) -> float:
            return cost(node) * (costly if is_collective(node) else 1.0)

        parts = parts_of(stages[stage])
        return Task(step, parts[part] if part == 0 or stage else [*parts[1], *parts[2]], seconds)

    return task(ahead, 0), task(back, 1)


def _in_turns(tasks: Sequence[Task], merged: MergedTasks) -> list[tuple[int, fx.Node]]:
    """The nodes of both tasks in the order in which they run: a task stops before each wait."""
    left = [_cut(task) for task in tasks]
    order = [(turn, node) for turn in merged.turns for node in left[turn].pop(0)]
    assert left == [[], []], "every turn of both tasks has its place"
    return order


def _cut(task: Task) -> list[list[fx.Node]]:
    turns: list[list[fx.Node]] = [[]]
    for node in task.nodes:
        if is_wait(node):
            turns.append([])
        turns[-1].append(node)
    return turns


@pytest.mark.parametrize(
    ("ahead", "back", "costly"), [(0, 0, 0.0), (0, 0, 1.0), (0, 1, 1.0), (0, 1, 100.0), (1, 0, 1.0)]
)
@pytest.mark.parametrize("case", CASES)
def test_merged_tasks_keep_their_dependencies_and_all_ranks_one_order_of_collectives(
    case: str, ahead: int, back: int, costly: float
) -> None:
    tasks = _tasks(case, 0, ahead, back, costly)
    merged = merge_tasks(*tasks)
    order = _in_turns(tasks, merged)
    for at, task in enumerate(tasks):
        mine = [node for lane, node in order if lane == at]
        assert mine == list(task.nodes)
        place = {node: where for where, node in enumerate(mine)}
        needs = _needs(task.step)
        assert all(place[other] < place[node] for node in mine for other in needs[node] if other in place)
    # Of each collective its task and number; the graphs of another rank have nodes of the same names.
    other = _tasks(case, 1, ahead, back)
    both = [
        [
            (lane, group_of(found[lane].step, node).axis, node.name)
            for lane, node in _in_turns(found, merged)
            if is_collective(node)
        ]
        for found in (tasks, other)
    ]
    assert both[0] == both[1] and len(both[0]) > 4
    assert merged == merge_tasks(*tasks)
    assert merged.hidden >= 0.0
    if costly == 1.0:
        assert merged.hidden > 0.0
        beside = [
            {turn for turn, _ in order[order.index((lane, begun(node))) : at]} == {0, 1}
            for at, (lane, node) in enumerate(order)
            if is_wait(node) and (lane, begun(node)) in order
        ]
        assert any(beside)


def test_tasks_of_equal_turns_alternate_and_hide_their_collectives() -> None:
    """Four products of 1 s and a collective of 1 s behind each but the last: 4 s and 3 s apart, 8 s of products merged.

    Only the last product of the second task has nothing beside it.
    """
    tasks = _tasks("tensor", 0, 0, 0)
    even = [Task(task.step, _four(task), _one_second) for task in tasks]
    merged = merge_tasks(even[0], even[1])
    assert merged.apart == 14.0 and merged.seconds == 8.0
    assert merged.turns == (0, 1) * 4


def _four(task: Task) -> list[fx.Node]:
    """The first three collectives with their waits, and four kernels around them."""
    kernels = [node for node in task.nodes if not is_collective(node) and not is_wait(node)]
    waits = [node for node in task.nodes if is_wait(node) and begun(node) in set(task.nodes)][:3]
    found = [kernels[0]]
    for at, wait in enumerate(waits, 1):
        found += [begun(wait), wait, kernels[at]]
    return found


def _one_second(node: fx.Node) -> float:
    return 0.0 if is_wait(node) else 1.0


@settings(max_examples=40, deadline=None)
@given(
    seconds=st.lists(st.integers(0, 9), min_size=64, max_size=64),
    slowdown=st.sampled_from([1.0, 1.3]),
)
def test_merging_is_never_longer_than_apart_nor_shorter_than_the_kernels(
    seconds: list[int], slowdown: float
) -> None:
    tasks = _tasks("tensor", 0, 0, 1)

    def cost(salt: int) -> Callable[[fx.Node], float]:
        number = {node: at for at, node in enumerate(tasks[salt].nodes)}
        return lambda node: 0.0 if is_wait(node) else float(seconds[(number[node] + 17 * salt) % 64])

    given_tasks = [Task(task.step, task.nodes, cost(at)) for at, task in enumerate(tasks)]
    merged = merge_tasks(given_tasks[0], given_tasks[1], slowdown=slowdown)
    kernels = sum(
        task.seconds(node) for task in given_tasks for node in task.nodes if not is_collective(node)
    )
    sent = sum(task.seconds(node) for task in given_tasks for node in task.nodes if is_collective(node))
    assert kernels <= merged.seconds + 1e-9
    assert merged.seconds <= merged.apart <= kernels * slowdown + sent + 1e-9
    _in_turns(given_tasks, merged)
