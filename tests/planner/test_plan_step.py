"""The estimate of a step: its forms against hand computation, and runs that no constant was fitted on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import SCHEDULES
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.operators import Products, RankGroup, Ranks, moved
from hyper_parallel.planner.cost_model.pipeline import bubble, micro_batches, pace
from hyper_parallel.planner.cost_model.step import estimate, seconds_by_kind
from hyper_parallel.planner.error_interval import between
from hyper_parallel.planner.framework_profiles import GENERIC, MEGATRON_LM
from hyper_parallel.planner.table import Table, sum_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

PLAIN = Constants(half_rows=0.0, half_columns=0.0, half_depth=0.0)


def table(name: str = "llama-3-8b", cluster: str = "h100x64", batch: int = 64, **spread: Any) -> Table:
    return Table.of(Workload(shape(name), batch, 8192), Cluster.named(cluster), GENERIC, **spread)


def test_a_product_is_the_slower_of_its_flops_and_its_bytes() -> None:
    t = table().replaced(tuned=1.0)
    multiply = Products(t, PLAIN)
    wide = multiply(np.array([4096.0]), np.array([4096.0]), np.array([4096.0]))
    assert wide[0] == pytest.approx(2 * 4096**3 / (t.peak16[0] * PLAIN.hopper))
    thin = multiply(np.array([1.0]), np.array([4096.0]), np.array([4096.0]))
    assert thin[0] == pytest.approx(2 * (4096 + 4096**2 + 4096) / (t.hbm[0] * PLAIN.memory))
    assert multiply(np.zeros(1), np.ones(1), np.ones(1))[0] == 0
    untuned = Products(t.replaced(tuned=0.0), PLAIN)(*[np.array([4096.0])] * 3)
    assert untuned[0] == pytest.approx(wide[0] / PLAIN.first)


def test_a_gather_runs_level_by_level() -> None:
    t = table(devices=64)
    k = Constants(hop=0.0, net_hop=0.0, crowding=0.0, inside=1.0, across=1.0)
    group = RankGroup.of(t, k, np.array([32.0]), np.ones(1))
    assert (group.node[0], group.network[0]) == (8, 4)
    bytes = np.array([8e9])
    by_hand = 7 / 8 * 8e9 / t.node_rate[0] + 3 / 4 * 1e9 / t.network_rate[0]
    assert group.gather(bytes)[0] == pytest.approx(by_hand)
    assert group.reduce(bytes)[0] == pytest.approx(2 * by_hand)
    apart = RankGroup.of(t, k, np.array([4.0]), np.array([8.0]))
    assert (apart.node[0], apart.network[0]) == (1, 4)
    alone = RankGroup.of(t, k, np.ones(1), np.ones(1))
    assert alone.gather(bytes)[0] == alone.exchange(bytes)[0] == alone.send(bytes)[0] == 0


def test_an_exchange_sends_each_rank_its_share() -> None:
    t = table(devices=64)
    k = Constants(hop=0.0, net_hop=0.0, crowding=0.0, inside=1.0, across=1.0)
    group = RankGroup.of(t, k, np.array([32.0]), np.ones(1))
    by_hand = 8e9 * (7 / 32 / t.node_rate[0] + 24 / 32 / t.network_rate[0])
    assert group.exchange(np.array([8e9]))[0] == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("1f1b", 1, 30.0),
        ("gpipe", 1, 30.0),
        ("interleaved", 2, 15.0),
        ("zb-h1", 1, 18.0),
        ("dualpipe", 1, 4.0),
    ],
)
def test_bubbles(schedule: str, virtual: int, expected: float) -> None:
    t = table(pipeline=4, virtual=virtual, schedule=SCHEDULES.index(schedule), devices=64)
    assert bubble(t, np.array([10.0]), np.array([2.0]))[0] == expected


def test_the_pace_is_that_of_the_slowest_stage() -> None:
    layer, head = np.array([1.0]), np.array([2.5])
    uneven = table(pipeline=5, devices=64)  # 32 layers: 7, 7, 6, 6, 6
    assert pace(uneven, layer, head)[0] == 6 + 2.5
    assert pace(table(devices=64), layer, head)[0] == 32 + 2.5
    by_cost = uneven.replaced(balanced=1)
    assert pace(by_cost, layer, head)[0] == 7  # (32 + 2.5) / 5 is 6.9


def test_micro_batches_of_a_step() -> None:
    assert micro_batches(table(shard=8, micro=2, devices=64))[0] == 4
    assert micro_batches(table(batch=1, shard=8, micro=2, devices=64))[0] == 1


def test_the_innermost_axis_stays_in_the_node() -> None:
    t = table(tensor_x=8, shard=8, devices=64)
    ranks = Ranks(t, Constants())
    assert ranks.x.node[0] == 8 and ranks.reducing.network[0] == 8
    inside = Ranks(t.replaced(order=4), Constants())  # data innermost
    assert inside.reducing.node[0] == 8 and inside.x.network[0] == 8


def _random(n: int, seed: int) -> Table:
    draw = np.random.default_rng(seed)

    def one_of(*values: float) -> np.ndarray:
        return draw.choice(values, n).astype(float)

    spread = {
        axis: one_of(1, 2, 4)
        for axis in ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline")
    }
    spread |= {
        "micro": one_of(1, 2),
        "zero": one_of(0, 1, 2, 3),
        "recompute": one_of(0, 1, 2),
        "expert": one_of(1, 2),
    }
    spread |= {
        "virtual": one_of(1, 2),
        "schedule": one_of(0, 2, 3),
        "method": one_of(0, 1),
        "order": one_of(0, 4),
    }
    spread |= {"sequence_parallel": one_of(0, 1), "state_on_host": one_of(0, 1)}
    devices = np.prod([spread[axis] for axis in list(spread)[:6]], axis=0)
    return table("qwen3-30b-a3b", "h100", **spread, devices=devices)


def test_parts_add_up_and_are_never_negative() -> None:
    t = _random(300, 0)
    found = estimate(t, fitted())
    assert all(np.all(part >= -1e-12) for part in found.parts.values())
    np.testing.assert_allclose(sum_of(found.parts), found.seconds)
    np.testing.assert_allclose(sum_of(found.memory), found.peak)
    assert np.all(np.isfinite(found.seconds)) and np.all(found.seconds > 0)


def test_a_row_is_estimated_alone_as_among_others() -> None:
    t = _random(50, 1)
    together = np.broadcast_to(estimate(t, fitted()).seconds, t.n)
    alone = [float(estimate(t.take(i), fitted()).seconds[0]) for i in range(t.n)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_what_computes_less_or_has_faster_links_is_no_slower() -> None:
    base = {"shard": 8, "tensor_x": 8, "devices": 64, "zero": 3}
    seconds = {
        name: float(estimate(table(**{**base, **change}), fitted()).seconds[0])
        for name, change in {"plain": {}, "again": {"recompute": 2}, "host": {"state_on_host": 1}}.items()
    }
    assert seconds["again"] > seconds["plain"] <= seconds["host"]
    t = table(**base)
    faster = estimate(t.replaced(network_rate=1e12, node_rate=1e13), fitted()).seconds[0]
    assert faster < seconds["plain"]


def test_the_interval_holds_the_estimate() -> None:
    t = table(shard=64, micro=[1.0, 2.0])
    told = estimate(t, fitted())
    low, high = between(t, told)
    assert np.all(low < told.seconds) and np.all(high > told.seconds)
    np.testing.assert_allclose(high / low, (high / low)[0])


# Runs that no constant was fitted on: Narayanan et al., arXiv 2104.04473, table 1 (throughput by its formula for
# FLOPs), and Korthikanti et al., arXiv 2205.05198, table 5 (seconds of a step). Both on A100s, attention not fused.
PUBLISHED_2104 = [
    # layers, hidden, heads, tensor, pipeline, devices, batch, TFLOP/s of a device, micro, virtual
    (40, 6144, 48, 8, 1, 256, 1024, 135, 8, 1),
    (48, 8192, 64, 8, 2, 512, 1536, 138, 4, 1),
    (60, 10240, 80, 8, 4, 1024, 1792, 140, 2, 1),
    (80, 12288, 96, 8, 8, 1536, 2304, 148, 2, 2),
    (96, 16384, 128, 8, 16, 1920, 2160, 155, 1, 3),
    (105, 20480, 128, 8, 35, 2520, 2520, 163, 1, 3),
    (128, 25600, 160, 8, 64, 3072, 3072, 163, 1, 2),
]
PUBLISHED_2205 = [
    # layers, hidden, heads, tensor, pipeline, devices, batch, seconds, micro, virtual, recompute, sequence_parallel
    (48, 6144, 64, 8, 1, 8, 4, 1.42, 4, 1, 2, 0),
    (48, 6144, 64, 8, 1, 8, 4, 1.10, 4, 1, 1, 1),
    (96, 12288, 96, 8, 8, 64, 64, 18.13, 1, 3, 2, 0),
    (96, 12288, 96, 8, 8, 64, 64, 13.75, 1, 3, 1, 1),
    (105, 20480, 128, 8, 35, 280, 280, 37.83, 1, 3, 1, 1),
    (128, 25600, 160, 8, 64, 512, 512, 71.49, 1, 1, 1, 1),
]


def _megatron(layers: int, hidden: int, heads: int, devices: int, batch: int, **spread: Any) -> float:
    gpt = Shape(
        name="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        gated=False,
        vocabulary=51200,
    )
    profile = replace(MEGATRON_LM, flash=0.0, overlap_data=0.0)
    t = Table.of(
        Workload(gpt, batch, 2048), Cluster.named(f"a100x{devices}"), profile, devices=devices, **spread
    )
    return float(sum_of(seconds_by_kind(t, fitted()))[0])


@pytest.mark.parametrize("run", PUBLISHED_2104)
def test_published_runs_of_2021(run: tuple[int, ...]) -> None:
    layers, hidden, heads, tensor, pipeline, devices, batch, rate, micro, virtual = run
    flops = (
        96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    )
    measured = flops / (devices * rate * 1e12)
    found = _megatron(
        layers,
        hidden,
        heads,
        devices,
        batch,
        tensor_x=tensor,
        pipeline=pipeline,
        replicate=devices // tensor // pipeline,
        micro=micro,
        virtual=virtual,
        schedule=2 if virtual > 1 else 0,
        recompute=2,
    )
    assert found == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("run", PUBLISHED_2205)
def test_published_runs_of_2022(run: tuple[float, ...]) -> None:
    layers, hidden, heads, tensor, pipeline, devices, batch, measured, micro, virtual, again, sequence = run
    found = _megatron(
        int(layers),
        int(hidden),
        int(heads),
        int(devices),
        int(batch),
        tensor_x=tensor,
        pipeline=pipeline,
        micro=micro,
        virtual=virtual,
        schedule=2 if virtual > 1 else 0,
        recompute=again,
        sequence_parallel=sequence,
    )
    assert found == pytest.approx(measured, rel=0.15)


def test_only_shared_paths_are_crowded() -> None:
    """On InfiniBand with a rail for each device a ring over 32 nodes is as fast as one over two, latency aside."""
    k = Constants(hop=0.0, net_hop=0.0, crowding=0.5)
    rails = table(devices=256)
    shared = rails.replaced(shared_paths=1.0)

    def rate(t: Table, nodes: float) -> float:
        return float(RankGroup.of(t, k, np.array([nodes]), np.array([8.0])).network_rate[0])

    assert rate(rails, 32) == rate(rails, 2) == pytest.approx(rails.network_rate[0] * k.across)
    assert rate(shared, 32) == pytest.approx(rate(rails, 32) / (1 + 0.5 * 5))
    assert rate(shared, 1) == rate(rails, 1)


def test_bytes_wait_for_memory_and_for_instructions() -> None:
    """A B200 moves bytes 2.4 times as fast as an H100 and issues hardly more instructions."""
    k = Constants(memory=0.9, issue=5.0)

    def rate(cluster: str) -> float:
        t = Table.of(Workload(shape("llama-3-8b"), 64, 8192), Cluster.preset(cluster), MEGATRON_LM)
        return float(1e9 / moved(t, k, np.array([1e9]))[0])

    assert rate("h100") == pytest.approx(1 / (1 / (0.9 * 3.35e12) + 5 / 33.5e12))
    assert rate("a100") == pytest.approx(1 / (1 / (0.9 * 2.039e12) + 5 / 19.5e12))
    assert 1.3 * rate("h100") < rate("b200") < 8 / 3.35 * 0.8 * rate("h100")
