"""Every preset is planned for; links without peer-to-peer and between roots cost what they are slower by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster, Link
from hyper_parallel.cluster.presets import names
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.explain import explain
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search
from hyper_parallel.workload.workload import Workload
from planner.plan_cases import DENSE

WORK = Workload(DENSE, batch=64, sequence=2048)


def seconds(cluster: Cluster, **fix: float) -> float:
    best = search(Question(workload=WORK, cluster=cluster, devices=16, fix=fix), fitted()).best[0]
    assert best.fits
    return best.seconds


@pytest.mark.parametrize("name", names())
def test_a_preset_is_planned_for(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.device is not None
    ideal = 6 * DENSE.parameters * 64 * 2048 / (16 * cluster.device.peak("bfloat16"))
    assert ideal < seconds(cluster) < 50 * ideal


def test_tensor_parallelism_costs_more_where_there_is_no_peer_to_peer() -> None:
    cluster = Cluster.preset("rtx4090")
    direct = replace(cluster, peer_to_peer=True)
    for tensor in (2, 8):
        assert seconds(cluster, tensor_x=tensor) > 1.1 * seconds(direct, tensor_x=tensor)


def test_groups_below_a_root_do_not_cross_between_roots() -> None:
    cluster = Cluster.preset("l40s")
    between = Link("node", 4e9, 5.7e-6)
    roots = replace(cluster, root=4, links={**cluster.links, "root": cluster.links["node"], "node": between})
    # Tensor parallelism of four stays below a root, and of eight does not.
    fix = {"shard": 1, "context": 1, "pipeline": 1, "tensor_y": 1}
    inside, across = (
        seconds(roots, tensor_x=tensor, **fix) / seconds(cluster, tensor_x=tensor, **fix) for tensor in (4, 8)
    )
    assert inside < 1.1
    assert across > 1.5
    asked = Question(workload=WORK, cluster=roots, devices=16, fix={"tensor_x": 8})
    eased = explain(search(asked, fitted()).best[0], asked, fitted()).eased
    assert "links between roots" in [one.what for one in eased]
