"""What is legal, against the rules written out once more as loops, and counts that are those of listing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import CONTEXT_METHODS, ORDERS, SCHEDULES, Columns, code, unique
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PIPELINES
from hyper_parallel.planner.space import StrategySpace, divisors
from hyper_parallel.schedule import named_schedule
from hyper_parallel.workload.published import shape as published
from hyper_parallel.workload.workload import Workload
from planner.plan_cases import DENSE, EXPERTS, groups, question

AXES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline")


def _degrees(asked: Question) -> set[tuple[int, ...]]:
    """Legal degrees and `expert`, by trying all."""
    shape, work = asked.workload.shape, asked.workload
    found = set()
    for degrees in product(divisors(asked.devices), repeat=len(AXES)):
        replicate, shard, context, x, y, stages = degrees
        tensor = x * y
        if math.prod(degrees) != asked.devices or stages > shape.layers or work.batch % (replicate * shard):
            continue
        if shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads):
            continue
        if y > 1 and (x == 1 or shape.hidden % x or work.sequence % tensor):
            continue
        if work.sequence % context:
            continue
        for expert in divisors(shape.experts) if shape.experts else [1]:
            if shard * context * tensor % expert == 0:
                found.add((*degrees, expert))
    return found


@pytest.mark.parametrize(
    "asked",
    [
        question(devices=12),
        question(EXPERTS, devices=16),
        question(replace(DENSE, layers=3, heads=12, kv_heads=3), devices=24),
    ],
    ids=["dense", "experts", "odd heads"],
)
def test_degrees_are_those_of_the_rules(asked: Question) -> None:
    rows = StrategySpace(asked).degrees()
    found = [tuple(int(rows[name][i]) for name in (*AXES, "expert")) for i in range(rows["shard"].size)]
    assert len(found) == len(set(found))
    assert set(found) == _degrees(asked)


@pytest.mark.parametrize(
    "asked", [question(devices=8), question(EXPERTS, devices=8)], ids=["dense", "experts"]
)
def test_points_are_counted_as_if_listed(asked: Question) -> None:
    space = StrategySpace(asked)
    rows, _ = space.micro.expand(space.degrees())
    rows, _ = space.dual.expand(rows)
    counted = space.counts(rows)
    whole = groups(asked)
    assert counted.sum() == space.kept_counts(whole).sum()
    some = {name: column[:500] for name, column in whole.items()}
    assert space.kept_counts(some).sum() == sum(ways["micro"].size for ways in space.kept(some))
    # No strategy stands in the space twice.
    names = [name for name in whole if name != "dual"]
    assert np.unique(np.stack([whole[name] for name in names]), axis=1).shape[1] == whole["micro"].size


def _rows(**columns: float) -> Columns:
    plain = dict.fromkeys((*AXES, "expert", "micro"), 1.0) | {"dual": 0.0}
    return {name: np.array([value]) for name, value in {**plain, **columns}.items()}


def _options(asked: Question, level: str, **columns: float) -> list[tuple[float, ...]]:
    found, _ = getattr(StrategySpace(asked), level).expand(_rows(**columns))
    names = getattr(StrategySpace(asked), level).columns
    return [tuple(float(found[name][i]) for name in names) for i in range(found["micro"].size)]


def test_stages_may_be_uneven_and_schedules_have_their_conditions() -> None:
    # 6 layers on 4 stages, 16 micro-batches.
    names = {
        (SCHEDULES[int(schedule)], parts) for schedule, parts in _options(question(), "schedules", pipeline=4)
    }
    assert names == {("1f1b", 1), ("gpipe", 1), ("zb-h1", 1)}
    # On 2 stages each rank may hold 2 or 3 parts, and both ends may be fed.
    names = {
        (SCHEDULES[int(schedule)], parts) for schedule, parts in _options(question(), "schedules", pipeline=2)
    }
    assert names >= {("interleaved", 2), ("interleaved", 3), ("zb-v", 2), ("dualpipe", 1)}
    # 16 / 16 = 1 micro-batch is no whole round of 2 stages, nor enough to feed both ends.
    names = {
        SCHEDULES[int(schedule)]
        for schedule, _ in _options(question(), "schedules", pipeline=2, shard=8, micro=2)
    }
    assert names == {"1f1b", "gpipe", "zb-h1", "zb-v"}
    assert _options(question(), "schedules") == [(code("schedule", "1f1b"), 1)]


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen-3-30b-a3b", "mixtral-8x7b", "llama-3-70b"])
def test_what_train_runs_has_the_schedules_of_train_alone(model: str) -> None:
    asked = Question(
        workload=Workload(published(model), 2048, 4096),
        cluster=Cluster.named("h100x512"),
        profile=HYPER_PARALLEL,
        runnable=True,
    )

    def schedules(asked: Question) -> set[str]:
        space = StrategySpace(asked)
        # Every row of degrees with what comes below it in the tree, DualPipe's branch included.
        rows, _ = space.dual.expand(space.degrees() | {"micro": np.ones(space.degrees()["shard"].size)})
        rows, _ = space.schedules.expand(rows | {"data": np.ones(rows["shard"].size)})
        return {SCHEDULES[int(one)] for one in np.unique(rows["schedule"])}

    assert schedules(asked) == PIPELINES.keys()
    for name in PIPELINES.values():
        assert named_schedule(name, 4, 16, None).stages >= 4
    assert "dualpipe" in schedules(replace(asked, runnable=False))


def test_methods_have_their_conditions() -> None:
    def methods(**columns: float) -> set[str]:
        return {CONTEXT_METHODS[int(method)] for _, _, method, _ in _options(question(), "splits", **columns)}

    assert methods() == {"ring"}
    # 16 query heads, 4 of keys: a hybrid splits over some of 8 ranks by heads, Ulysses over all.
    assert methods(context=8) == {"ring", "ulysses", "hybrid"}
    assert methods(context=4) == {"ring", "ulysses"}
    assert methods(context=8, tensor_x=4) == {"ring"}


def test_what_has_no_ranks_has_one_name() -> None:
    assert _options(question(), "splits") == [(0, 0, 0, 1)]
    assert {zero for zero, *_ in _options(question(), "splits", shard=2)} == {1, 2, 3}
    assert {zero for zero, *_ in _options(question(), "splits", context=2)} == {1, 2, 3}
    assert {sequence for _, sequence, *_ in _options(question(), "splits", tensor_x=2)} == {0, 1}
    assert {sequence for _, sequence, *_ in _options(question(), "splits", tensor_x=2, tensor_y=2)} == {1}


def test_orders_count_where_they_differ() -> None:
    assert _options(question(), "orders") == [(0,)]
    assert _options(question(), "orders", shard=8) == [(0,)]
    two = [ORDERS[int(order)] for (order,) in _options(question(), "orders", shard=8, tensor_x=2)]
    assert {order.index("data") < order.index("tensor_x") for order in two} == {True, False}
    assert len(two) == 2
    every = _options(question(), "orders", shard=2, tensor_x=2, tensor_y=2, context=2, pipeline=2)
    assert len(every) == len(ORDERS)


def test_kinds_of_rows_are_found_by_counting() -> None:
    columns = {"a": np.array([5.0, 2, 5, 2, 7]), "b": np.array([1.0, 1, 1, 4, 1])}
    first, kind = unique(columns)
    assert sorted(first) == [0, 1, 3, 4]
    assert all(columns[name][first[kind[i]]] == columns[name][i] for name in columns for i in range(5))
