"""A prediction goes through the passes that training goes through, in the same order and for the same machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from harness.examples import captured_examples
from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.predict import cluster_of, predict_run
from hyper_parallel.estimate.prediction import micro_batch, model_of
from hyper_parallel.graph import Pass, StepGraph, pass_manager
from hyper_parallel.graph.pass_manager import SCHEDULE, Ran
from hyper_parallel.offloading.autograd.parallel_context import Around
from hyper_parallel.offloading.schedule.offload_pass import Offload
from hyper_parallel.overlap import Overlap
from hyper_parallel.planner.auto import candidates
from hyper_parallel.planner.refine import refine
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.shard import parallelize, process_mesh, sharded
from hyper_parallel.step.capture_train_step import BatchShape, capture_step
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.recipe import Recipe

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
EXAMPLES = captured_examples()
LAYERS = {"deepseek-v3.yaml": 4}
"""Layers of an example in which others than two are the fewest with all kinds."""
H100 = "NVIDIA H100 80GB HBM3"

Described = tuple[Any, ...]


class _Device:
    """A back end of which only the device's name matters."""

    def device_name(self) -> str:
        return H100


def _described(one: Pass, world: int) -> Described:
    """A pass and the settings that decide what it does.

    Left out: tiers, which are measured in training and described in a prediction, and the load of experts, which a
    prediction has in the rows that it captures.
    """
    if isinstance(one, Overlap):
        return one.name, replace(one.cluster.for_workers(world), name=""), one.memory, one.pieces
    if isinstance(one, Offload):
        return one.name, one.budget, one.choices, tuple(space.name for space in one.spaces)
    return (one.name,)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[Described]]:
    """Runs something, and returns the passes of captured steps on the way. None chooses an order: that takes long."""
    found: list[Described] = []
    run = pass_manager.run_passes

    def recorded(step: StepGraph, passes: Sequence[Pass]) -> list[Ran]:
        world = max((rank + 1 for group in step.groups.values() for rank in group.ranks), default=1)
        found.extend(_described(one, world) for one in passes)
        return run(step, [one for one in passes if SCHEDULE not in one.provides])

    def passes_of(does: Callable[[], object]) -> list[Described]:
        found.clear()
        does()
        return list(found)

    monkeypatch.setattr(pass_manager, "run_passes", recorded)
    monkeypatch.setattr(process_mesh, "backend", lambda kind: _Device())
    return passes_of


def _small(example: Path, *overrides: str) -> RunConfig:
    """The example with few layers, and one micro-batch."""
    given = [f"model.config.num_hidden_layers={LAYERS.get(example.name, 2)}", *overrides]
    run = config.load(example, given)
    if run.effective_strategy.memory.recompute_layers is not None:
        given.append("strategy.memory.recompute_layers=1")
    batch = run.effective_strategy.axes.data * micro_batch(run)
    return config.load(example, [*given, f"train.batch={batch}"])


def _trained(run: RunConfig, budget: Budget | None = None) -> None:
    """The passes of a run's first step, as a worker of it has them."""
    strategy = run.effective_strategy
    with fake_ranks(strategy.axes.world, 0):
        shadow = model_of(run, [])
        parallelize(shadow, strategy, lowering="traceable")
        graphs = Graphs(Recipe.of(run, shadow), "cpu", budget=budget)
        shape = BatchShape(((micro_batch(run), run.data.sequence),), (False,))
        assert graphs.ready(shape), graphs.refused


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_prediction_takes_the_passes_of_training(example: Path, seen: Any) -> None:
    run = _small(example)
    strategy = run.effective_strategy
    trained = seen(lambda: _trained(run))
    assert seen(lambda: predict_run(run, cluster_of("h100", run))) == trained
    assert strategy.axes.world > 1
    again = ["layers"] * (strategy.memory.recompute == "layer")
    assert [name for name, *_ in trained] == [*again, "regather", "overlap"]


def test_refinement_and_automatic_choice_take_them_too(seen: Any) -> None:
    run = _small(QUICKSTART)
    cluster = cluster_of("h100", run)
    trained = seen(lambda: _trained(run))
    file = PlannedRunFile(run.model_dump(mode="json", exclude_unset=True), "", ())
    assert seen(lambda: refine([file], cluster, lambda _: None)) == trained
    assert seen(lambda: candidates._simulated((run.model_dump_json(), cluster))) == trained


def test_a_budget_is_met_by_the_pass_that_is_predicted(seen: Any) -> None:
    # A step that moves something; the tiers of training are this machine's, and small.
    run = _small(
        QUICKSTART,
        "model.config.num_hidden_layers=4",
        "strategy.memory={device: 24MiB, host: 64MiB}",
        "data.sequence=64",
    )
    with contextlib.closing(Budget(run.effective_strategy, "cpu")) as budget:
        trained = seen(lambda: _trained(run, budget))
    assert seen(lambda: predict_run(run, cluster_of("h100", run))) == trained
    assert [name for name, *_ in trained] == ["regather", "overlap", "offload"]


def test_offloading_in_a_loop_of_ones_own_takes_the_same_gathers_and_the_same_budget(seen: Any) -> None:
    run = _small(QUICKSTART, "strategy.axes={shard: 2}", "strategy.sequence=false")
    with fake_ranks(2, 0):
        model = parallelize(model_of(run, []), run.effective_strategy, lowering="traceable")
        captured = capture_step(Recipe.of(run, model), BatchShape(((1, 16),), (False,)))
        around = seen(lambda: Around(sharded(model)).rewritten(captured, ["model.layers.0"]))
    assert [name for name, *_ in around] == ["layers", "regather"]
    alone = nn.Linear(4, 4)
    swapped = hp.offload(alone, budget="1MiB", host="1MiB", cluster=Cluster.named("h100"))
    assert [name for name, *_ in seen(lambda: swapped(torch.zeros(2, 4)).sum().backward())] == ["offload"]
