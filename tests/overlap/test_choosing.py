"""What the overlap pass chooses: what is predicted to pay, within memory, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.equivalence import STRATEGIES, build_model, family_config
from harness.families import FAMILIES
from harness.llama_recipe import recipe_of
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.estimate.build_trace import captured_step
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap import FsdpBaseline, overlap
from hyper_parallel.overlap.chunked_matmul import NO_CHUNKS, WHOLE
from hyper_parallel.overlap.order_search import OrderSearch
from hyper_parallel.step.capture_train_step import BatchShape, capture_step
from hyper_parallel.trace import Timeline


@pytest.fixture(scope="module")
def step() -> StepGraph:
    """Two micro-batches."""
    return _step(2)


def _step(micro_batches: int) -> StepGraph:
    """A step of a Llama of two layers, tensor 2 · shard 2, as rank 0 of ranks that are not there."""
    with fake_ranks(4, 0):
        shape = BatchShape(((1, 4096),) * micro_batches, (False,) * micro_batches)
        return capture_step(recipe_of(2), shape)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Four H100s with a tenth of their links, on which communication is a good part of the step."""
    return _slow(10)


@pytest.fixture(scope="module")
def usual(step: StepGraph, cluster: Cluster) -> float:
    """Seconds of the step by the usual schedule."""
    return _as_it_is(FsdpBaseline()(step), cluster).step


@pytest.fixture(scope="module")
def free(step: StepGraph, cluster: Cluster) -> Any:
    """What is chosen where memory is no object."""
    return overlap(step, cluster)


def _as_it_is(step: StepGraph, cluster: Cluster) -> Timeline:
    return OrderSearch(step, cluster, balanced_sizes(step), False).as_it_is()


def _slow(times: float) -> Cluster:
    h100 = Cluster.named("h100x4")
    return replace(
        h100, links={name: replace(x, bandwidth=x.bandwidth / times) for name, x in h100.links.items()}
    )


def test_what_pays_is_chosen_and_beats_the_usual_schedule(step: StepGraph, usual: float, free: Any) -> None:
    found = free
    assert found.chosen is not None and found.chosen.together == 2
    assert found.after.step < usual < found.before.step
    assert found.after.masked.blocked is not None and found.before.masked.blocked is not None
    assert found.before.masked.blocked < 0.05 and found.after.masked.blocked > 0.8
    assert "simulated" in str(found) and "masked" in str(found)


def test_the_peak_stays_within_the_memory_that_is_given(step: StepGraph, cluster: Cluster, free: Any) -> None:
    room = (free.before.peak.bytes + free.after.peak.bytes) // 2
    tight = overlap(step, cluster, memory=room)
    assert free.after.peak.bytes > room >= tight.after.peak.bytes
    assert free.after.step < tight.after.step < tight.before.step


def test_with_no_room_beyond_what_the_step_holds_its_communication_is_hidden_all_the_same(
    step: StepGraph, cluster: Cluster, usual: float, free: Any
) -> None:
    """Then micro-batches that fill each other's gaps do not fit."""
    room = int(free.before.peak.bytes * 1.05)
    tight = overlap(step, cluster, memory=room, pieces=False)
    assert tight.chosen is not None and not tight.chosen.usual
    assert tight.after.peak.bytes <= room
    assert tight.after.step < usual


def test_a_rewrite_that_does_not_pay_is_not_made(step: StepGraph, cluster: Cluster) -> None:
    quick = {
        name: replace(link, bandwidth=1e18, latency=0.0, setup=0.0) for name, link in cluster.links.items()
    }
    found = overlap(step, replace(cluster, links=quick))
    assert found.chosen is None and found.step is step and found.after is found.before
    assert "nothing pays" in str(found)


def test_collectives_go_in_pieces_where_no_other_micro_batch_hides_them() -> None:
    """One micro-batch, so that a layer's own products are all that can run beside its collectives."""
    step, cluster = _step(1), _slow(20)
    found = overlap(step, cluster)
    whole = overlap(step, cluster, pieces=False)
    assert whole.chosen is not None and whole.chosen.chunks == NO_CHUNKS
    assert found.chosen is not None and found.chosen.chunks.forward != WHOLE
    assert "in pieces: forward gathers in" in str(found)
    assert found.after.step < whole.after.step


def test_a_node_that_gives_several_tensors_is_no_product_in_pieces() -> None:
    """Gradients of GPT-2's norms are results of one node, and are summed over the copies."""
    family = FAMILIES["gpt2"]
    run = family_config(family, STRATEGIES["replicate 2 shard 2"])
    step = captured_step(build_model(family), run, run.strategy, 2, passes(run.strategy, ordered=False))
    assert any("native_layer_norm_backward" in str(node.target) for node in step.nodes)
    found = overlap(step, Cluster.named("h100x4"))
    assert found.after.step <= found.before.step
