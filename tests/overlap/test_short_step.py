"""The order of collectives that is searched on a few layers: as good on all of them as one that is searched on all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from harness.llama_recipe import recipe_of
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.pass_manager import SCHEDULE, Rewrite, rewritten, validate
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.overlap import Overlapped, overlap
from hyper_parallel.step.accumulation import rewritten_loop
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one

LAYERS, FEW = 16, 8


@dataclass
class _Given:
    """The pass that orders collectives, which keeps what it is given."""

    name: str = "given"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({SCHEDULE, "overlap"})
    conflicts: frozenset[str] = frozenset()
    steps: list[StepGraph] = field(default_factory=list)

    def __call__(self, step: StepGraph) -> StepGraph:
        self.steps.append(step)
        return step


def _captured(micro_batches: int) -> StepGraph:
    with fake_ranks(4, 0):
        return capture_one(recipe_of(LAYERS), MicroBatchShape(1, 2048, False), micro_batches)


@pytest.fixture(scope="module", params=[1, 2])
def step(request: pytest.FixtureRequest) -> StepGraph:
    """What the pass is given for one micro-batch, and for a loop over pairs."""
    given, count = _Given(), request.param
    captured = _captured(count)
    if count == 1:
        rewritten(captured, [given])
    else:
        rewritten_loop(captured, "parameters", count, [given])
    (found,) = given.steps
    return found


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    h100 = Cluster.named("h100x4")
    return replace(
        h100, links={name: replace(x, bandwidth=x.bandwidth / 10) for name, x in h100.links.items()}
    )


@pytest.fixture(scope="module")
def free(step: StepGraph, cluster: Cluster) -> Overlapped:
    """What few layers choose where memory is no object."""
    return overlap(step, cluster)


def _layers(step: StepGraph) -> int:
    return len({region_of(node).layer for node in step.nodes} - {""})


def test_the_pass_is_given_a_step_of_few_layers_too(step: StepGraph) -> None:
    assert step.short is not None
    short = step.short()
    assert (_layers(step), _layers(short)) == (LAYERS, FEW)
    micro = {region_of(node).micro_batch for node in step.nodes}
    assert {region_of(node).micro_batch for node in short.nodes} == micro


def test_what_few_layers_choose_is_as_good_as_what_all_do(
    step: StepGraph, cluster: Cluster, free: Overlapped
) -> None:
    short, step.short = step.short, None
    try:
        whole = overlap(step, cluster)
    finally:
        step.short = short
    validate(step, free.step, chosen=True)
    assert whole.chosen is not None
    assert free.after.step <= whole.after.step * 1.01
    assert free.after.step < free.before.step * 0.95


def test_what_few_layers_choose_fits_with_all(step: StepGraph, cluster: Cluster, free: Overlapped) -> None:
    most = (free.before.peak.bytes + free.after.peak.bytes) / 2
    found = overlap(step, cluster, memory=most)
    assert found.after.peak.bytes <= max(most, found.before.peak.bytes)
    assert found.after.step < found.before.step


def test_a_pass_that_moves_across_layers_ends_the_short_step() -> None:
    captured = _captured(1)
    kept = Rewrite("kept", lambda step: step.copy())
    moved = Rewrite("moved", lambda step: step.copy(), provides=frozenset({"offload"}))
    assert rewritten(captured, [kept]).short is not None
    assert rewritten(captured, [kept, moved]).short is None
