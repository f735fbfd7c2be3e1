"""Collectives that a library runs in parts beside the products that they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Collective, Op, Trace

DEVICE = Device("d", {"float32": 1e12}, {"float32": 1e12}, Tier("device", 1e12, 1e12, 1e12))


def seconds(kind: str, axis: str, hidden: dict[str, float]) -> float:
    """Of one collective of two ranks that gives 4e12 bytes, over 1e12 B/s with a second of latency."""
    call = Collective(kind, (0, 1), 4 * 10**12, axis, axis)
    ops = (Op(0, kind, queue=f"comm:{axis}", collective=call),)
    links = {"node": Link("node", 1e12, 1.0)}
    cluster = Cluster(device=replace(DEVICE, comm_hidden=hidden), links=links, name="c")
    return simulate(Trace({"all": ops}, {0: "all", 1: "all"}), cluster).step


def test_a_share_of_its_bytes_takes_no_time_and_its_latency_stays() -> None:
    assert seconds("all_gather", "tensor_x", {}) == pytest.approx(1 + 4)
    assert seconds("all_gather", "tensor_x", {"tensor_x": 0.75}) == pytest.approx(1 + 1)
    assert seconds("reduce_scatter", "tensor_x", {"tensor_x": 0.75}) == pytest.approx(1 + 0.5)


def test_other_axes_and_all_reduces_are_waited_for() -> None:
    hidden = {"tensor_x": 0.75}
    assert seconds("all_gather", "shard", hidden) == seconds("all_gather", "shard", {})
    assert seconds("all_reduce", "tensor_x", hidden) == seconds("all_reduce", "tensor_x", {})
