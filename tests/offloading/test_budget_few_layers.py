"""Budgets planned on few layers: the settings that are found there are as good for all layers as those found on all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from harness.llama_recipe import recipe_of
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import Pass, StepGraph
from hyper_parallel.graph.graph_file import from_bytes, to_bytes
from hyper_parallel.graph.likeness import difference
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.offloading import OffloadTier, Rate
from hyper_parallel.offloading.schedule import graph_search, planning_progress
from hyper_parallel.offloading.schedule.allowed_rewrites import ANY, Choices
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.equal_graphs import EqualGraphs, Settings
from hyper_parallel.offloading.schedule.offload_pass import Planned, planned
from hyper_parallel.offloading.schedule.planning_progress import PlanningProgress
from hyper_parallel.overlap.fsdp_baseline_schedule import layered
from hyper_parallel.step.accumulation import repeated, rewritten_loop
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one

LAYERS, FEW = 16, 8
CLUSTER = Cluster.named("h100x4")
LINK = Rate(1e-6, 4e9)
AS_IT_IS = Choices(recompute=False, order=False, update="device")


def _captured(micro_batches: int) -> StepGraph:
    with fake_ranks(4, 0):
        return capture_one(recipe_of(LAYERS), MicroBatchShape(1, 2048, False), micro_batches)


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return _captured(1)


def _layers(step: StepGraph) -> int:
    return len({region_of(node).layer for node in step.nodes} - {""})


def _budget(step: StepGraph, share: float) -> int:
    problem = build_problem(step, CLUSTER, 0, ())
    return int(problem.working_set + share * (max(problem.profile()) - problem.working_set))


SHARE = 0.5
"""Of the way from the working set to the peak: the budget."""


def _planned(step: StepGraph) -> tuple[Planned, list[int]]:
    """The step under the budget, and how many layers each search was of."""
    searched: list[int] = []
    search = EqualGraphs._search

    def counted(graphs: EqualGraphs, progress: PlanningProgress, later: int) -> graph_search.Variant:
        searched.append(_layers(graphs.step))
        return search(graphs, progress, later)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EqualGraphs, "_search", counted)
        # Steps of this size are too quick to be worth a search.
        patch.setattr(graph_search, "REPAID", 10**9)
        patch.setattr(graph_search, "PLANS", 5)
        found = planned(step, CLUSTER, _budget(step, SHARE), (OffloadTier("host", 2**40, LINK, LINK),))
    return found, searched


@pytest.fixture(scope="module")
def few(step: StepGraph) -> Planned:
    """The plan whose settings few layers chose."""
    found, searched = _planned(step)
    assert searched == [FEW]
    return found


@pytest.mark.parametrize("passes", [[], [layered]], ids=["as written", "ordered"])
def test_a_step_of_several_micro_batches_has_a_short_one(passes: list[Pass]) -> None:
    whole = repeated(rewritten_loop(_captured(2), "parameters", 2, passes), 2)
    assert whole.short is not None
    first, second = whole.short(), whole.short()
    assert (_layers(whole), _layers(first)) == (LAYERS, FEW)
    assert {region_of(node).micro_batch for node in first.nodes} == {
        region_of(node).micro_batch for node in whole.nodes
    }
    assert difference(first, second) is None


def test_what_few_layers_choose_is_as_good_as_what_all_do(
    step: StepGraph, few: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings of other dials than the step has are of no use, and all layers are searched.
    monkeypatch.setattr(EqualGraphs, "settings_of_few_layers", lambda *_: Settings(("none",), (1,), False))
    every, searched = _planned(step)
    assert searched == [LAYERS]
    assert few.changed and every.changed
    assert few.plan.seconds <= every.plan.seconds * 1.01
    assert few.plan.peak <= few.problem.budget == every.problem.budget


def test_the_same_step_has_the_same_plan(step: StepGraph, few: Planned) -> None:
    assert _planned(step)[0].plan == few.plan


def test_a_budget_below_the_working_set_is_refused_with_the_least_of_all_layers(step: StepGraph) -> None:
    least = build_problem(step, CLUSTER, 0, ()).working_set
    with pytest.raises(BudgetError) as refused:
        planned(step, CLUSTER, 1, (OffloadTier("host", 2**40, LINK, LINK),), choices=AS_IT_IS)
    assert refused.value.floor == least


def test_what_is_outside_of_layers_counts_by_the_share_of_layers(step: StepGraph) -> None:
    assert step.short is not None
    short = step.short()
    graphs = EqualGraphs(short, CLUSTER, 0, (), 1.0, ANY)
    part = FEW / LAYERS
    full, scaled = graphs.captured, replace(graphs, part=part).captured
    outside = {entry.name: storage for storage, entry in short.outside.items() if "layers." not in entry.name}
    head = outside["parameter.lm_head.weight"]
    assert scaled.by_storage[head].bytes == int(full.by_storage[head].bytes * part)
    (inside,) = [
        s for s, entry in short.outside.items() if entry.name == "parameter.model.layers.0.mlp.up_proj.weight"
    ]
    assert scaled.by_storage[inside].bytes == full.by_storage[inside].bytes
    assert full.seconds * part < scaled.seconds < full.seconds


def test_a_step_that_is_read_has_its_short_one(step: StepGraph) -> None:
    assert step.short is not None
    read, _ = from_bytes(to_bytes(step, None, step.short()), step.groups)
    assert read.short is not None
    assert difference(read.short(), step.short()) is None
    assert from_bytes(to_bytes(step), step.groups)[0].short is None


def test_planning_says_about_how_long_it_takes_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr(planning_progress.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    progress = PlanningProgress(lines.append)
    progress.advance(100, 900, "graph 2 of at most 10")
    progress.advance(100, 800, "graph 3 of at most 10")
    progress.advance(100, 700, "graph 4 of at most 10")
    # The first is too soon; at the second 4 s were 200 of 1,000 nodes.
    assert lines == ["planning memory: graph 3 of at most 10, at most about 16.0 s left"]
