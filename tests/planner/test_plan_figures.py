"""Figures of a row: model FLOPs as `workload.work` counts them, parts that add up, names for codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import error_interval
from hyper_parallel.planner.columns import code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.format import axes, between, order, seconds, settings
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.metrics import figures, flops_per_token, mfu, peak
from hyper_parallel.planner.table import Table
from hyper_parallel.workload import Flops
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

LAYER = 4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 14336
"""Elements of the matrices of a layer of llama-3-8b."""
LLAMA = Flops(32 * LAYER + 4096 * 128256, heads_times_size=4096, windows=(None,) * 32)


def _table(name: str = "llama-3-8b", **spread: float) -> Table:
    work = Workload(shape(name), batch=128, sequence=8192)
    return Table.of(work, Cluster.named("h100x64"), GENERIC, **spread)


def test_flops_are_those_of_the_one_convention() -> None:
    counted = LLAMA.per_token(8192)
    assert flops_per_token(_table())[0] == pytest.approx(counted, rel=1e-12)


def test_flops_of_windows_are_those_of_the_one_convention() -> None:
    table = _table().replaced(window=1024, windowed=1)
    counted = replace(LLAMA, windows=(1024,) * 32).per_token(8192)
    assert flops_per_token(table)[0] == pytest.approx(counted, rel=1e-12)


def test_flops_of_experts_count_those_that_are_chosen() -> None:
    whole = shape("deepseek-v3")
    found = flops_per_token(_table("deepseek-v3").replaced(sequence=1.0))[0]
    # 6 a weight that a token meets: the active ones without the embedding and norms, and next to no attention.
    assert found == pytest.approx(6 * (whole.active_parameters - whole.vocabulary * whole.hidden), rel=0.01)


def test_the_peak_is_that_of_the_precision() -> None:
    table = _table()
    assert peak(table)[0] == table.peak16[0]
    assert peak(table.replaced(precision=code("precision", "fp8")))[0] == table.peak8[0] > table.peak16[0]


def test_figures_add_up_and_codes_have_names() -> None:
    table = _table(
        shard=np.array([8, 64]), tensor_x=np.array([8, 1]), zero=3, recompute=code("recompute", "full")
    )
    found = figures(table, estimate(table, Constants()))
    assert len(found) == 2
    for one in found:
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert sum(one.memory.values()) == pytest.approx(one.peak)
        assert one.tokens_per_second * one.seconds * one.devices == pytest.approx(128 * 8192)
        assert one.strategy["recompute"] == "full"
        assert 0 < one.communicating < one.seconds
    assert found[0].mfu == pytest.approx(float(mfu(table, estimate(table, Constants()).seconds)[0]))
    assert axes(found[0].strategy) == "shard 8 · tensor_x 8"
    assert axes(found[1].strategy) == "shard 64"
    assert settings(found[1].strategy) == "micro 1, ZeRO-3, recompute full"
    assert order(found[0].strategy) == "tensor_x < data"
    on_host = {**found[1].strategy, "state_on_host": 1.0, "weights_on_host": 0.25}
    assert settings(on_host) == "micro 1, ZeRO-3, recompute full, state and 25% of weights on host"


def test_cost_is_of_all_devices_over_all_tokens() -> None:
    table = _table(shard=64, zero=3)
    one = figures(table, estimate(table, Constants()))[0]
    steps = 1e12 / (128 * 8192)
    assert one.cost(2.0, 1e12) == pytest.approx(steps * one.seconds * 64 / 3600 * 2.0)


def test_an_interval_is_told_in_the_unit_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_interval, "quantiles", lambda: {"dense": 0.2, "mixture": 0.5})
    table = _table(shard=64, zero=3)
    one = figures(table, estimate(table, Constants()))[0]
    low, high = (float(part) for part in between(one).split("–"))
    assert low == pytest.approx(one.seconds * np.exp(-0.2), rel=0.01)
    assert high == pytest.approx(one.seconds * np.exp(0.2), rel=0.01)
    assert seconds(one).endswith(f"s, 90%: {between(one)}")
