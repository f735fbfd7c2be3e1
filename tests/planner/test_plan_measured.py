"""The numbers of the closed forms, read off a machine that was measured; and all strategies of a small question."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster, CollectiveTable, Device, Efficiency, ShapeTable, Shared, Tier
from hyper_parallel.cluster.collective_cost import all_gather
from hyper_parallel.planner.auto.candidates import ranked
from hyper_parallel.planner.auto.machine import is_measured, read_off
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.cost_model.operators import Products
from hyper_parallel.planner.cost_model.step import overlapped_pass, seconds_by_kind
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

LATENCY, RATE = 3e-4, 4e8
WORK = Workload(Shape("small", 2, 64, 4, 2, 16, ffn=128, gated=True, vocabulary=512), 8, 64, "fp32")


def machine() -> Cluster:
    """Four workers that share two cores."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    points = ((4096.0, 1e-3), (4194304.0, 1e-2))
    tables = tuple(CollectiveTable(kind, "node", 4, points, LATENCY, RATE, 0.1) for kind in kinds)
    products = (ShapeTable("float32", "nn", best=0.8, half=(16.0, 8.0, 4.0)),)
    device = Device(
        "cores",
        {"float32": 5e10},
        {"float32": 5e9},
        Tier("device", 8e9, 1e10, 1e10),
        5e-6,
        Efficiency(matmul=products),
    )
    return Cluster(device=device, shared={4: Shared(device, tables)}).for_workers(4)


def test_a_gather_takes_what_was_measured() -> None:
    seen, constants = read_off(machine(), "fp32")
    bytes = 1e6
    own = 2 * constants.hop + 3 / 4 * bytes / (seen.links["node"].bandwidth * constants.inside)
    assert own == pytest.approx(all_gather(4, bytes / 4, LATENCY, RATE), rel=1e-4)


def test_a_product_takes_what_was_measured() -> None:
    seen, constants = read_off(machine(), "fp32")
    row = Table.of(WORK, seen, profile("hyper-parallel"), devices=4.0)
    m, n, depth = 256.0, 512.0, 1024.0
    share = 0.8 / (1 + 16 / m) / (1 + 8 / n) / (1 + 4 / depth)
    took = Products(row, constants)(*(row.layers * 0 + size for size in (m, n, depth)))
    assert float(took[0]) == pytest.approx(2 * m * n * depth / (5e10 * share), rel=1e-6)


def test_workers_share_the_memory_and_hide_nothing() -> None:
    seen, constants = read_off(machine(), "fp32")
    assert seen.device and seen.device.memory.bytes == 2e9
    assert constants.hidden_data < 1e-3 and constants.beside == 1.0
    assert constants.imbalance == fitted().imbalance
    wide, narrow = (read_off(machine(), precision)[1] for precision in ("fp32", "bf16"))
    assert wide.elementwise == 2 * narrow.elementwise
    assert is_measured(machine()) and not is_measured(Cluster.named("h100x8"))


def test_float32_sends_twice_the_bytes() -> None:
    seen, constants = read_off(machine(), "fp32")
    found = {}
    for precision in ("fp32", "bf16"):
        work = replace(WORK, precision=precision)
        row = Table.of(work, seen, profile("hyper-parallel"), tensor_x=4.0)
        found[precision] = seconds_by_kind(row, replace(constants, hop=1e-15))["tensor"]
    assert found["fp32"] == pytest.approx(2 * found["bf16"])


def test_workers_that_move_what_they_send_take_turns_with_themselves() -> None:
    _, constants = read_off(machine(), "fp32")
    for busy, collective in ((3.0, 1.0), (1.0, 3.0)):
        assert overlapped_pass(constants, np.array([busy]), np.array([collective])) == busy + collective


def test_all_strategies_are_listed_best_first() -> None:
    seen, constants = read_off(machine(), "fp32")
    question = Question(
        workload=WORK, cluster=seen, profile=profile("hyper-parallel"), devices=4, runnable=True
    )
    found, best = list(ranked(question, constants)), search(question, constants)
    # All fit: of the layers none or all are recomputed, or no scores kept.
    of_whole_layers = search(replace(question, fix={"recomputed": 1.0}), constants).counted
    assert best.counted > len(found) == of_whole_layers > 300
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds) and math.isclose(seconds[0], best.best[0].seconds)
    # Where room is short, the fewest layers that fit are recomputed.
    peaks = [one.peak for one in found if one.strategy["recompute"] == "none"]
    room = sorted(peaks)[len(peaks) // 2] * constants.slack + constants.outside
    short = replace(
        question,
        cluster=replace(
            seen,
            device=replace(seen.device, memory=Tier("device", room, 1e10, 1e10)),
        ),
    )
    some = list(ranked(short, constants))
    assert some[0].seconds == pytest.approx(search(short, constants).best[0].seconds)
    assert {one.strategy["recomputed"] for one in some if one.strategy["recompute"] == "full"} == {0.5, 1.0}
    none = replace(
        question, cluster=replace(seen, device=replace(seen.device, memory=Tier("device", 1e6, 1e10, 1e10)))
    )
    assert list(ranked(none, constants)) == []
