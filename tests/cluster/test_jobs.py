"""A job on several supernodes takes equally many devices of each, where a whole number divides it."""

from __future__ import annotations

import pytest

from hyper_parallel.cluster import Cluster


@pytest.mark.parametrize(
    ("workers", "supernode"),
    [(36, 72), (64, 72), (72, 72), (144, 72), (128, 64), (256, 64), (100, 72), (200, 40)],
)
def test_of_a_rack_with_72_devices(workers: int, supernode: int) -> None:
    assert Cluster.named(f"gb200-nvl72x{workers}").for_workers(workers).supernode == supernode


def test_no_group_of_64_crosses_a_rack() -> None:
    cluster = Cluster.named("gb200-nvl72x256")
    group, bytes = tuple(range(64, 128)), 1 << 30
    of_job = cluster.for_workers(256).collective_seconds("all_to_all", bytes, group)
    assert of_job == cluster.for_workers(64).collective_seconds("all_to_all", bytes, tuple(range(64)))
    assert of_job < 0.5 * cluster.collective_seconds("all_to_all", bytes, group)


def test_other_clusters_are_as_they_were() -> None:
    for name in ("h100x64", "cloudmatrix384"):
        cluster = Cluster.named(name)
        assert cluster.for_workers(48) == cluster
