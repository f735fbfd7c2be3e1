"""The parts of a step add up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Collective, Op, Span, Trace
from hyper_parallel.trace.timeline import step_parts
from hyper_parallel.workload.work import Work


def _product(index: int, after: tuple[int, ...] = ()) -> Op:
    work = Work.of_matmul(4096, 4096, 4096, dtype="bfloat16")
    return Op(index, "aten.mm", "layer", "forward", work=work, after=after)


def test_kernels_and_exposed_collectives_add_up() -> None:
    gather = Collective("all_gather", (0, 1), 1 << 28, "shard", "shard")
    norm = Work("reduce", read=1e9, written=1e3)
    update = Work("optimizer", read=2e9, written=1e9)
    ops = (
        _product(0),
        Op(1, "gather", "layer", "forward", "comm:shard", collective=gather, after=(0,)),
        _product(2, after=(1,)),
        Op(3, "aten.sum", "layer", "forward", work=norm),
        Op(4, "update", "", "optimizer", work=update),
    )
    timeline = simulate(Trace({"all": ops}, {0: "all", 1: "all"}), Cluster.named("h100x2"))
    found = step_parts(timeline)
    assert sum(found.values()) == pytest.approx(timeline.step)
    assert set(found) == {"products", "all_gather over shard", "elementwise", "optimizer"}
    assert found["all_gather over shard"] == pytest.approx(timeline.exposed)


def test_waiting_for_launches_is_the_hosts_part() -> None:
    cluster = Cluster.named("h100")
    assert cluster.device is not None
    slow = replace(cluster, device=replace(cluster.device, host_launch=1.0))
    timeline = simulate(Trace({"all": (_product(0), _product(1))}, {0: "all"}), slow)
    found = step_parts(timeline)
    assert sum(found.values()) == pytest.approx(timeline.step)
    assert found["host"] == pytest.approx(2.0, rel=0.01)
    assert "waiting" in step_parts(replace(timeline, predicted=False))


def test_tasks_are_shared_out_by_what_they_consist_of() -> None:
    op = Op(0, "F0", "stage 0", "forward")
    timeline = simulate(Trace({"all": (op,)}, {0: "all"}), Cluster.named("h100"))
    timeline = replace(timeline, spans=(Span(0, "vector", 0.0, 2.0, op, 0.0),))
    assert step_parts(timeline) == {"tasks": 2.0}
    parts = step_parts(timeline, {"products": 6.0, "all_gather over tensor_x": 2.0})
    assert parts == {"products": 1.5, "all_gather over tensor_x": 0.5}
