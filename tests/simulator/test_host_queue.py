"""The host's queue: launches before kernels, waits for numbers, and traces without launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Collective, Op, Trace
from hyper_parallel.workload.work import Work

DEVICE = Device("d", {"float32": 1e12}, {"float32": 1e12}, Tier("device", 1e12, 1e12, 1e12))


def cluster(launch: float) -> Cluster:
    """Kernels of 1e12 FLOPs take a second; `launch`: seconds of the host for each."""
    device = replace(DEVICE, host_launch=launch)
    return Cluster(device=device, links={"node": Link("node", 1e12, 0.0)}, name="c")


def kernel(index: int, seconds: float) -> Op:
    """A product."""
    return Op(index, "mm", work=Work("matmul", flops=seconds * 1e12, dtype="float32"))


def ends(ops: list[Op], launch: float, ranks: int = 1) -> list[float]:
    """When each op ends."""
    trace = Trace({"all": tuple(ops)}, dict.fromkeys(range(ranks), "all"))
    return [span.end for span in simulate(trace, cluster(launch)).spans]


def test_a_step_takes_its_launches_or_its_kernels_whichever_are_longer() -> None:
    small, large = [kernel(i, 1.0) for i in range(10)], [kernel(i, 5.0) for i in range(10)]
    assert ends(small, 3.0)[-1] == pytest.approx(10 * 3.0 + 1.0)
    assert ends(large, 3.0)[-1] == pytest.approx(3.0 + 10 * 5.0)
    assert ends(small, 0.0)[-1] == pytest.approx(10.0)


def test_the_host_runs_ahead_during_a_long_kernel() -> None:
    # The launches of ops 1 to 3 are hidden behind op 0; without running ahead the end would be 10 + 3 · 4.
    assert ends([kernel(0, 10.0), *(kernel(i, 1.0) for i in (1, 2, 3))], 3.0)[-1] == pytest.approx(3 + 10 + 3)


def test_the_host_launches_nothing_while_it_waits_for_a_number() -> None:
    ops = [kernel(0, 10.0), Op(1, "item", work=Work("host")), kernel(2, 1.0), kernel(3, 1.0)]
    # Op 0 ends at 3 + 10; what is behind the number is enqueued from then on.
    assert ends(ops, 3.0) == pytest.approx([13.0, 13.0, 13 + 3 + 1, 13 + 6 + 1])


def test_views_and_ops_without_work_are_not_launched() -> None:
    ops = [Op(0, "view", work=Work("view")), Op(1, "wait"), kernel(2, 1.0)]
    assert ends(ops, 3.0)[-1] == pytest.approx(4.0)


def test_collectives_are_launched_in_turn_and_their_wait_is_the_hosts() -> None:
    call = Collective("all_gather", (0, 1), 10**12, "shard", "shard")
    gather = Op(1, "gather", queue="comm:shard", collective=call, after=(0,))
    ops = [kernel(0, 1.0), gather, replace(kernel(2, 1.0), after=(1,))]
    trace = Trace({"all": tuple(ops)}, dict.fromkeys(range(2), "all"))
    found = simulate(trace, cluster(3.0))
    assert [span.end for span in found.spans] == pytest.approx([4.0, 7.0, 10.0])
    assert found.bubbles.runtime == pytest.approx(3.0 + 2.0 + 2.0)
    assert found.bubbles.communication == pytest.approx(1.0)
    assert found.bubbles.imbalance == 0.0


def test_an_operator_of_several_kernels_is_launched_as_often() -> None:
    ops = [Op(0, "grouped_mm", work=Work("matmul", flops=1e12, dtype="float32")), kernel(1, 1.0)]
    device = replace(DEVICE, host_launch=3.0, host_kernels={"grouped_mm": 4.0})
    several = replace(cluster(3.0), device=device)
    timeline = simulate(Trace({"all": tuple(ops)}, {0: "all"}), several)
    # Four launches before the first op, one more before the second.
    assert [span.end for span in timeline.spans] == pytest.approx([4 * 3 + 1.0, 5 * 3 + 1.0])
