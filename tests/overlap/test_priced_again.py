"""A step with buckets is priced by what is known of the step before: only what is new is looked at."""

from __future__ import annotations

import pytest

from harness.llama_recipe import recipe_of
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph.ir import is_collective
from hyper_parallel.overlap import jobs
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.overlap.jobs import Priced
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one


def test_buckets_leave_the_costs_of_all_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(4, 0):
        step = capture_one(recipe_of(3), MicroBatchShape(1, 64, False), 1)
    before, bucketed = Priced.of(step), Buckets()(step)
    joined = [node for node in bucketed.nodes if is_collective(node) and node.name not in before.costs]
    assert joined
    anew = Priced.of(bucketed)
    looked_at = []
    own = jobs.costs
    monkeypatch.setattr(
        jobs, "costs", lambda step, sizes, nodes: looked_at.extend(nodes) or own(step, sizes, nodes)
    )
    again = Priced.of(bucketed, None, before.costs)
    assert {node.name: again.costs.get(node.name) for node in bucketed.nodes} == {
        node.name: anew.costs.get(node.name) for node in bucketed.nodes
    }
    assert set(joined) <= set(looked_at)
    assert not {node.name for node in looked_at} & before.costs.keys()
