"""What facts of a framework do to an estimate: fused operators, reduction beside the backward pass, gathered inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fit_constants.published_runs import evidence

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.layer import layer
from hyper_parallel.planner.cost_model.memory import memory
from hyper_parallel.planner.cost_model.operators import Products, Ranks
from hyper_parallel.planner.cost_model.step import seconds_by_kind
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.table import Table, sum_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

SHAPE = Shape("small", 16, 2048, 32, 32, 64, ffn=8192, gated=True, vocabulary=32000)
CLUSTER = Cluster.named("h100x32")
CLUSTER_HBM = 3.35e12
"""B/s of an H100's memory."""


def table(framework: str = "nanotron", batch: int = 64, **columns: Any) -> Table:
    spread = {"devices": 32.0, "replicate": 4.0, "tensor_x": 8.0, "micro": 4.0, **columns}
    return Table.of(Workload(SHAPE, batch, 4096), CLUSTER, profile(framework), **spread).replaced()


def parts(t: Table) -> dict[str, float]:
    return {name: float(part.max()) for name, part in seconds_by_kind(t, fitted()).items()}


def peak(t: Table) -> float:
    return float(sum_of(memory(t)).max())


def test_gathered_inputs_of_which_nothing_is_known_are_half_of_both() -> None:
    t = table(sequence_parallel=1.0)
    kept, again = (peak(t.replaced(regathers=value)) for value in (0.0, 1.0))
    assert kept > 1.1 * again
    assert peak(t.replaced(regathers=0.5)) == pytest.approx((kept + again) / 2)
    assert peak(t) == pytest.approx((kept + again) / 2)  # what nanotron's option was is not published


def test_nanotron_reduces_beside_the_backward_pass_without_zero_only() -> None:
    whole = parts(table())["gradients"]
    split = table(replicate=1.0, shard=4.0, zero=1.0)
    assert parts(split)["gradients"] > 2 * whole
    assert parts(split.replaced(overlap_split=1.0))["gradients"] == pytest.approx(whole)


def test_a_pass_is_longest_beside_either_where_host_and_device_are_as_busy() -> None:
    """As one layer takes more rows, launches stop to matter; in between a pass takes longer than either alone."""
    micro = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    t = table(batch=32 * 4, micro=micro, replicate=4.0)
    k = fitted()
    found = seconds_by_kind(t, k)
    busy = found["products"] + found["attention"] + found["elementwise"]
    waits = found["launches"] / busy
    assert np.all(np.diff(waits) < 0)
    assert waits[0] > 0.5
    assert 0 < waits[-1] < 0.05


def test_what_no_gradient_needs_is_not_computed_again() -> None:
    """A layer that stops early leaves out the last product of its MLP, a quarter of this one's products."""
    t = table(replicate=32.0, tensor_x=1.0, recompute=2.0, recomputed=1.0, batch=128)
    whole, stopped = (parts(t.replaced(stops=value)) for value in (0.0, 1.0))
    again = 16 * Products(t, fitted())(np.array([4 * 4096.0]), t.hidden, t.ffn)[0]
    assert whole["again"] - stopped["again"] == pytest.approx(float(again), rel=0.01)
    assert {name for name in whole if abs(whole[name] - stopped[name]) > 1e-9} == {"again", "straggling"}
    nothing = t.replaced(recompute=0.0)
    assert parts(nothing.replaced(stops=1.0)) == parts(nothing)


def test_partly_fused_operators_take_the_bytes_between_both() -> None:
    t = table("megatron-deepspeed", micro=16.0, batch=64)
    assert float(t.fused.max()) == 0.5
    none, some, all_of_them = (parts(t.replaced(fused=value))["elementwise"] for value in (0.0, 0.5, 1.0))
    assert all_of_them < some < none


@pytest.mark.parametrize(("framework", "unit"), [("nanotron v0.5", 2**30), ("NeMo 24.07", 10**9)])
def test_the_unit_of_a_peak(framework: str, unit: int, tmp_path: Any) -> None:
    """nanotron's log divides by 2³⁰ and says GB."""
    run = {
        "row_id": "1", "source_id": "S99", "model": "llama-3-8b", "hardware": "H100", "n_devices": "16", "tp": "2",
        "gbs": "64", "seq_len": "8192", "framework": framework, "iter_time_s": "3", "mem_gb": "70",
        "mem_kind": "GPU memory as printed (GB)", "status": "ok", "notes": "",
    }  # fmt: skip
    path = tmp_path / "runs.csv"
    path.write_text(",".join(run) + "\n" + ",".join(run.values()) + "\n")
    assert evidence(path).peak.tolist() == [70 * unit]


def test_biases_of_experts_by_hand() -> None:
    """Of GPT-OSS: 4 of 128 experts of 2,880 features; 64 bytes an element where each expert's is added apart."""
    model, k = shape("gpt-oss-120b"), Constants(elementwise=1.0, memory=1.0, issue=0.0)
    t = Table.of(Workload(model, 64, 4096), CLUSTER, profile("megatron-lm"), shard=32.0, expert=32.0)
    t = t.replaced(even=1.0, graphs=1.0)

    def told(t: Table) -> tuple[float, float]:
        one = layer(t, k, Ranks(t, k))
        return float(one.elementwise[0]), float(one.launches[0])

    none, by_expert, joined = (
        told(t.replaced(expert_bias=biased, bias_by_expert=apart))
        for biased, apart in ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0))
    )
    elements = 4096 * 4 * 2880
    assert 2.6 * (by_expert[0] - none[0]) == pytest.approx(64 * elements / CLUSTER_HBM)
    assert 2.6 * (joined[0] - none[0]) == pytest.approx(6 * elements / CLUSTER_HBM)
    # Four experts lie on a rank: a product and a sum of each, then joined and cast.
    assert by_expert[1] - none[1] == pytest.approx((2 * 4 + 2) * k.launch)
    assert joined[1] - none[1] == pytest.approx(k.launch)
    assert t.expert_bias[0] == t.bias_by_expert[0] == 1
    assert table().expert_bias[0] == 0


def test_an_activation_reads_a_gate_where_there_is_one() -> None:
    """Of the bytes of an MLP: its activation reads two columns of products and not one."""
    k = Constants(elementwise=1.0, memory=1.0, issue=0.0)
    gated = Table.of(Workload(SHAPE, 64, 4096), CLUSTER, profile("megatron-lm"), shard=32.0)

    def elementwise(t: Table) -> float:
        return float(layer(t, k, Ranks(t, k)).elementwise[0])

    more = elementwise(gated) - elementwise(gated.replaced(gated=0.0))
    assert more == pytest.approx(2 * 4096 * SHAPE.ffn / CLUSTER_HBM)


def test_shared_experts_hide_exchanges_that_run_beside_them() -> None:
    k = fitted()
    t = Table.of(
        Workload(shape("deepseek-v3"), 64, 4096), CLUSTER, profile("megatron-lm"), shard=32.0, expert=32.0
    )
    t = t.replaced(overlap_expert=0.0, graphs=1.0)

    def exposed(t: Table) -> float:
        return float(layer(t, k, Ranks(t, k)).apart.expert[0])

    beside = exposed(t.replaced(shared_beside=1.0))
    assert 0 < beside < exposed(t)
    without = t.replaced(shared_ffn=0.0)
    assert exposed(without.replaced(shared_beside=1.0)) == exposed(without)
    assert profile("nemo-automodel").shared_beside == 1 and profile("megatron-lm").shared_beside == 0


def test_a_grace_launches_more_slowly() -> None:
    """The host of a rack that is one supernode; recorded graphs leave as large a share to it."""
    k = Constants(grace=1.5)
    for cluster, times in (("b200", 1.0), ("gb200-nvl72", 1.5), ("cloudmatrix384", 1.0)):
        t = Table.of(Workload(SHAPE, 64, 4096), Cluster.preset(cluster), profile("megatron-lm"), shard=8.0)
        plain = layer(t, replace(k, grace=1.0), Ranks(t, k)).launches[0]
        assert layer(t, k, Ranks(t, k)).launches[0] == pytest.approx(times * plain)
