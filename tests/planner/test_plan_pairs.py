"""What `train` runs: exchanges of experts beside the other micro-batch of a pair, and gathers in turns with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import Constants, constants_for, fitted
from hyper_parallel.planner.cost_model.dims import held, trained
from hyper_parallel.planner.cost_model.layer_collectives import paired
from hyper_parallel.planner.cost_model.operators import Ranks
from hyper_parallel.planner.cost_model.step import estimate, gathered, overlapped_pass
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL, PROFILES
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

H100S = Cluster.named("h100x512")
K = constants_for(HYPER_PARALLEL, H100S)
FULL = {"zero": 3.0, "sequence_parallel": 1.0, "recompute": 2.0}
TENSOR = {"shard": 128.0, "tensor_x": 4.0, "micro": 8.0, "recomputed": 59 / 61, **FULL}
SPREAD = {"shard": 256.0, "tensor_x": 2.0, "expert": 64.0, "recomputed": 32 / 61, **FULL}


def table(**spread: Any) -> Table:
    """DeepSeek-V3 on 512 H100, 2,048 sequences of 4,096 tokens a step."""
    return Table.of(Workload(shape("deepseek-v3"), 2048, 4096), H100S, HYPER_PARALLEL, **spread)


def seconds(t: Table, k: Constants = K) -> float:
    return float(estimate(t, k).seconds[0])


def test_strategies_are_ranked_as_they_are_simulated() -> None:
    """Simulated by `plan --fix ... --refine 1`: 37.2 s and 32.5 s."""
    tensor, spread = seconds(table(**TENSOR)), seconds(table(**SPREAD))
    assert spread < tensor
    assert tensor == pytest.approx(37.2, rel=0.10) and spread == pytest.approx(32.5, rel=0.10)


def test_exchanges_are_hidden_in_pairs_alone() -> None:
    # 8, 4 and 1 micro-batches; with a pipeline 16.
    shown = {
        name: float(estimate(t, K).parts["expert"][0])
        for name, t in {
            "8": table(**SPREAD),
            "4": table(**SPREAD | {"micro": 2.0}),
            "1": table(**SPREAD | {"micro": 8.0}),
            "pipeline": table(**SPREAD | {"shard": 128.0, "pipeline": 2.0}),
        }.items()
    }
    assert shown["8"] == shown["4"] == 0 and shown["1"] > 5 and shown["pipeline"] > 5
    # Where workers compute what they send, nothing is hidden.
    assert not paired(table(**SPREAD), replace(K, beside=1.0)).any()


def test_a_pass_lasts_as_long_as_its_links_are_in_use() -> None:
    k = Constants(beside=0.1)

    def lasts(busy: float, *links: float) -> float:
        return float(overlapped_pass(k, *(np.array([each]) for each in (busy, *links)))[0])

    assert lasts(10.0, 3.0, 5.0, 5.0) == pytest.approx(10.8)
    assert lasts(10.0, 8.0, 5.0, 5.0) == pytest.approx(13.0)
    # 2 of 5 seconds of exchanges are not hidden, and a part of the 10.
    assert lasts(10.0, 3.0, 5.0, 3.0) == pytest.approx(10.6)


def test_a_slower_network_costs_what_computation_does_not_hide() -> None:
    plain = table(**SPREAD)
    rate = float(plain.network_rate[0])
    times = [seconds(plain.replaced(network_rate=rate / by)) for by in (0.1, 1.0, 2.0)]
    assert times[0] < times[1] < times[2]
    assert times[2] > 1.8 * times[1]  # the network is what the step waits for


def test_experts_that_nothing_spreads_are_gathered_as_the_rest_of_their_layer() -> None:
    t = table(**TENSOR)
    ranks, own = Ranks(t, K), held(t)
    found = gathered(t, ranks, own, trained(t, own))
    layer = own.layer + 2 * own.embedding / t.layers
    expected = ranks.gathering.gather(2 * layer) + ranks.gathering.gather(2 * own.experts)
    assert found.forward == pytest.approx(expected)
    # Gradients are scattered in float32.
    assert found.backward == pytest.approx(3 * found.forward, rel=0.01)


def test_links_are_those_of_the_cluster_for_what_train_runs() -> None:
    assert (K.inside, K.across) == (0.81, 0.9) and K.crowding < 1e-3
    others = [profile for profile in PROFILES.values() if profile is not HYPER_PARALLEL]
    assert all(constants_for(profile, H100S) is fitted() for profile in others)
    # Estimates of published runs rest on none of this.
    assert not any(profile.ordered or profile.scatter_bytes > 2 for profile in others)
