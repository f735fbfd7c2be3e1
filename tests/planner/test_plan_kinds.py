"""Other token mixers, adapters, and modules that predict one token more: limits, monotony, counts by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fit_constants.published_runs import RUNS

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import format
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.dims import adapters, held, mixer_parameters, product_bytes
from hyper_parallel.planner.cost_model.memory import memory
from hyper_parallel.planner.cost_model.step import estimate, seconds_by_kind
from hyper_parallel.planner.csv_runs.cells import records
from hyper_parallel.planner.csv_runs.rows import rows
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.metrics import flops_per_token
from hyper_parallel.planner.space import StrategySpace, left_out
from hyper_parallel.planner.table import COLUMNS, Table, of_cluster, sum_of
from hyper_parallel.workload.mixers import LayerMix
from hyper_parallel.workload.published import CONFIGS, shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.transformers_config import to_config
from hyper_parallel.workload.workload import ALL, Adapter, Workload
from planner.plan_cases import BLOCKS, DENSE, EXPERTS, HYBRID, MAMBA, question

K = Constants()


def table(
    model: Shape, cluster: str = "h100x8", *, work: dict[str, Any] | None = None, **spread: Any
) -> Table:
    workload = Workload(model, 8, 4096, **(work or {}))
    return Table.of(workload, Cluster.named(cluster), GENERIC, **{"shard": 8, "zero": 1, **spread})


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
@pytest.mark.parametrize(
    "spread", [{}, {"shard": 2, "tensor_x": 4, "sequence_parallel": 1}, {"pipeline": 2, "shard": 4}]
)
def test_a_hybrid_without_other_mixers_is_the_plain_model_exactly(
    model: Shape, spread: dict[str, Any]
) -> None:
    mix = LayerMix(mixer=None, mixing=0, attending=model.layers, feeding=model.layers, norms=2 * model.layers)
    plain, mixed = table(model, **spread), table(replace(model, mix=mix), **spread)
    assert replace(model, mix=mix).parameters == model.parameters
    for one, other in ((estimate(plain, K), estimate(mixed, K)),):
        assert {name: part.tolist() for name, part in one.parts.items()} == {
            name: part.tolist() for name, part in other.parts.items()
        }
        assert {name: part.tolist() for name, part in one.memory.items()} == {
            name: part.tolist() for name, part in other.memory.items()
        }


def test_sizes_of_a_mixer_count_only_where_layers_have_it() -> None:
    mix = LayerMix(
        mixer=MAMBA, mixing=0, attending=DENSE.layers, feeding=DENSE.layers, norms=2 * DENSE.layers
    )
    one, other = estimate(table(DENSE), K), estimate(table(replace(DENSE, mix=mix)), K)
    assert one.seconds == other.seconds
    assert one.peak == other.peak


@pytest.mark.parametrize("model", [HYBRID, BLOCKS, shape("nemotron-3-nano"), shape("kimi-linear-48b-a3b")])
def test_a_rank_holds_its_share_of_all_parameters(model: Shape) -> None:
    t = table(model, shard=1, zero=0, devices=1)
    own = held(t)
    counted = float((t.layers * own.all() + (1 if model.tied else 2) * own.embedding)[0])
    # Norms, biases and the router are left out.
    assert counted == pytest.approx(model.parameters, rel=2e-3)
    bytes = {name: float(part.max()) for name, part in memory(t).items()}
    assert bytes["parameters"] == pytest.approx(2 * model.parameters, rel=2e-3)
    split = held(table(model, shard=1, zero=0, tensor_x=2))
    assert float(split.all()[0]) == pytest.approx(float(own.all()[0]) / 2)


def test_a_mixers_products_and_scan_against_a_count_by_hand() -> None:
    t = table(HYBRID)
    assert float(mixer_parameters(t)[0]) == MAMBA.parameters(HYBRID.hidden)
    # Mamba-2: scores of 4 groups over 128 tokens, their sums over 64 heads of 64, states of 64 · 64 in and out.
    assert MAMBA.scanned == 2 * 128 * (64 * 4 + 64 * 64) + 4 * 64 * 64 * 64
    whole = 6 * (HYBRID.parameters - HYBRID.vocabulary * HYBRID.hidden) + 3 * 4 * MAMBA.scanned
    attended = 12 * 2 * 2048 * 4096 / 2
    assert float(flops_per_token(t)[0]) == pytest.approx(whole + attended, rel=2e-3)


@pytest.mark.parametrize("model", [HYBRID, BLOCKS])
def test_more_of_a_mixer_takes_longer_and_more_memory(model: Shape) -> None:
    assert model.mix is not None
    before = estimate(table(model), K)
    for bigger in (
        replace(MAMBA, inputs=2 * MAMBA.inputs),
        replace(MAMBA, inner=2 * MAMBA.inner),
        replace(MAMBA, heads=2 * MAMBA.heads, channels=2 * MAMBA.channels),
    ):
        after = estimate(table(replace(model, mix=replace(model.mix, mixer=bigger))), K)
        assert after.seconds > before.seconds
        assert after.peak >= before.peak
    reference = estimate(table(model).replaced(scans=0.0), K)
    assert reference.seconds > before.seconds
    assert reference.peak > before.peak


def test_what_a_mixer_leaves_out_of_the_search_has_a_reason() -> None:
    space = StrategySpace(question(HYBRID, devices=64)).degrees()
    assert set(space["tensor_x"] * space["tensor_y"]) == {1, 2, 4}
    assert space["context"].max() > 1
    some = StrategySpace(question(HYBRID, devices=64, runnable=True)).degrees()
    assert some["tensor_x"].max() == some["context"].max() == 1
    assert "train splits no mamba2 layers" in left_out(MAMBA, True)[0]
    assert "a ring" in left_out(MAMBA, False)[1]
    convolution = replace(MAMBA, kind="convolution")
    assert "no framework splits convolution layers" in left_out(convolution, False)[0]
    assert left_out(None, False) == []
    mix = LayerMix(mixer=convolution, mixing=4, attending=2, feeding=6, norms=12)
    none = StrategySpace(question(replace(HYBRID, mix=mix), devices=64)).degrees()
    assert none["tensor_x"].max() == none["context"].max() == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_published_hybrids_are_written_as_their_config(name: str) -> None:
    found = Shape.of_config(to_config(shape(name)), name)
    assert replace(found, source="", positions=0) == replace(shape(name), source="", positions=0)


def test_other_hybrids_are_written_by_no_family() -> None:
    with pytest.raises(ConfigError, match=r"give its config\.json"):
        to_config(HYBRID)


PUBLISHED = {
    "nemotron-h-8b": 8.1,
    "nemotron-3-nano": 31.6,
    "nemotron-3-super": 120.6,
    "qwen3-next-80b-a3b": 79.7,
    "jamba-v0.1": 51.6,
    "minimax-text-01": 456.0,
    "kimi-linear-48b-a3b": 49.1,
}


def test_published_hybrids_have_as_many_parameters_as_published() -> None:
    assert set(PUBLISHED) == set(CONFIGS)
    for name, billions in PUBLISHED.items():
        assert shape(name).parameters == pytest.approx(billions * 1e9, rel=2e-3), name


def test_adapters_of_no_rank_cost_the_forward_pass_and_the_inputs_gradients() -> None:
    whole = table(DENSE).replaced(fused=1.0)
    frozen = table(DENSE, work={"adapter": Adapter(1)}).replaced(adapter_rank=0.0, adapter_outputs=0.0)
    k = replace(K, launch=0.0)
    one, other = seconds_by_kind(whole, k), seconds_by_kind(frozen, k)
    assert other["products"] == pytest.approx(one["products"] * 2 / 3)
    assert other["attention"] == pytest.approx(one["attention"])
    assert other["elementwise"] == pytest.approx(one["elementwise"])
    for kind in ("sums", "gradients", "optimizer"):
        assert other[kind] == pytest.approx(0, abs=1e-4)
    bytes = memory(frozen)
    assert bytes["gradients"] == bytes["optimizer"] == 0
    assert float(bytes["parameters"][0]) == pytest.approx(2 * DENSE.parameters, rel=1e-3)


def test_a_higher_rank_takes_longer_and_more_memory_and_stays_below_the_whole_model() -> None:
    seen = [estimate(table(DENSE, work={"adapter": Adapter(rank)}), K) for rank in (1, 8, 64, 512)]
    assert all(one.seconds < other.seconds and one.peak < other.peak for one, other in pairwise(seen))
    whole = estimate(table(DENSE), K)
    assert seen[2].seconds < whole.seconds
    assert seen[2].peak < whole.peak
    for targets in (("qkv",), ("attention",), ("mlp",)):
        fewer = estimate(table(DENSE, work={"adapter": Adapter(64, targets)}), K)
        assert fewer.seconds < seen[2].seconds
        assert fewer.peak < seen[2].peak


def test_frozen_weights_of_fewer_bits_take_less_memory() -> None:
    def parameters(base: Any) -> float:
        return float(memory(table(DENSE, work={"adapter": Adapter(8, base=base)}))["parameters"][0])

    found = [parameters(base) for base in ("fp32", "bf16", "int8", "nf4")]
    own = 2 * Adapter(8).parameters(DENSE)
    assert [(bytes - own) / DENSE.parameters for bytes in found] == pytest.approx([4, 2, 1, 0.516], rel=2e-3)


def test_elements_of_adapters_against_a_count_by_hand() -> None:
    hidden, keys, ffn = 2048, 512, 8192
    attention = 2 * (hidden + hidden) + 2 * (hidden + keys)
    layer = attention + 3 * (hidden + ffn)
    assert Adapter(16).parameters(DENSE) == 16 * 6 * layer
    assert Adapter(16, ("q_proj", "v_proj")).parameters(DENSE) == 16 * 6 * (3 * hidden + keys)
    t = table(DENSE, work={"adapter": Adapter(16)})
    assert float((t.layers * adapters(t))[0]) == Adapter(16).parameters(DENSE)
    assert Workload(DENSE, 8, 4096, adapter=Adapter(16)).trained_parameters == 16 * 6 * layer
    mixed = Adapter(4, ("mixer",))
    assert mixed.parameters(HYBRID) == 4 * 4 * (2048 + MAMBA.inputs + MAMBA.inner + 2048)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 0}, "rank is 1 to"),
        ({"rank": 8, "targets": ("qproj",)}, "did you mean"),
        ({"rank": 8, "targets": ()}, "give all-linear"),
        ({"rank": 8, "base": "int3"}, "bf16, fp32, int8, nf4"),
    ],
)
def test_adapters_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Adapter(**given)


def test_the_advice_of_a_refusal_serves() -> None:
    with pytest.raises(ConfigError, match="none of the linear layers mixer; give all-linear"):
        Workload(DENSE, 8, 4096, adapter=Adapter(8, ("mixer",)))
    assert Workload(DENSE, 8, 4096, adapter=Adapter(8, ("all-linear",))).adapter is not None
    for name in ALL:
        assert Adapter(8, (name,)).linear == {name}
    with pytest.raises(ConfigError, match="give one"):
        Workload(DENSE, 8, 4096, adapter=Adapter(8), prediction_modules=1)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_module_that_predicts_one_token_more_is_a_layer_and_a_head(model: Shape) -> None:
    spread = {"pipeline": 2, "shard": 4, "micro": 1}
    without, one, two = (
        estimate(table(model, work={"prediction_modules": n}, **spread), K) for n in (0, 1, 2)
    )
    assert without.seconds < one.seconds < two.seconds
    assert without.peak <= one.peak <= two.peak
    t = table(model, work={"prediction_modules": 1})
    mlp = model.matrices * model.hidden * (model.chosen * model.expert_ffn + model.shared_ffn or model.ffn)
    multiplied = model.attention + mlp + model.hidden * (model.experts + 2 * model.hidden + model.vocabulary)
    more = flops_per_token(t) - flops_per_token(table(model))
    assert float(more[0]) == pytest.approx(6 * multiplied)
    alone = {"shard": 1, "zero": 0, "devices": 1}
    bytes = [memory(table(model, work={"prediction_modules": n}, **alone))["parameters"] for n in (0, 1)]
    assert float((bytes[1] - bytes[0])[0]) == pytest.approx(2 * model.prediction_module, rel=2e-3)


def test_published_runs_of_these_kinds_have_estimates() -> None:
    """Model FLOPs are those that the sources divide by."""
    given = [
        record
        for record in records(RUNS)
        if "Nemotron_3" in record["model"]
        or "task=LoRA" in record["notes"]
        or (record["model"] == "deepseek-v3" and "NeMo 26.04" in record["framework"])
    ]
    t, found = rows(given)
    assert len(given) == t.n == 23 and not any(row.unsupported for row in found)
    stated = np.array(
        [float(r["tflops_per_device"]) / float(r["tokens_per_s_per_device"]) * 1e12 for r in given]
    )
    assert flops_per_token(t) / stated == pytest.approx(np.ones(t.n), abs=0.12)
    seconds = np.array(
        [
            float(b) * float(s) / float(r["tokens_per_s_per_device"]) / float(n)
            for r, b, s, n in zip(given, t.batch, t.sequence, t.devices, strict=True)
        ]
    )
    assert np.median(np.abs(estimate(t, fitted()).seconds / seconds - 1)) < 0.25
    assert all("adapter" in row.filled for row in found if row.model.startswith("LLAMA2"))
    assert {row.filled.get("prediction modules", "")[:1] for row in found if "Super" in row.model} == {"2"}


def test_every_part_is_finite_and_none_negative() -> None:
    for model in (HYBRID, BLOCKS):
        for scans in (0.0, 1.0):
            seen = estimate(table(model, tensor_x=2, shard=2, context=2, method=1).replaced(scans=scans), K)
            for part in (*seen.parts.values(), *seen.memory.values()):
                assert np.all(np.isfinite(part) & (part >= 0))
            assert np.isfinite(sum_of(seen.memory)).all()
    assert {"mixer_inputs", "frozen", "prediction_modules"} <= set(COLUMNS)


@pytest.mark.parametrize(
    ("precision", "kept", "copies"),
    [("bf16", 2.0, 0.0), ("fp8", 1.0, 0.0), ("mxfp8", 1 + 1 / 32, 1 / 16), ("nvfp4", 1 / 2 + 1 / 16, 9 / 8)],
)
def test_bytes_of_formats_with_their_scales(precision: Any, kept: float, copies: float) -> None:
    t = table(DENSE, work={"precision": precision}, shard=1, zero=0, devices=1)
    assert product_bytes(t) == kept
    wide = table(DENSE, shard=1, zero=0, devices=1)
    linear = DENSE.parameters - 2 * DENSE.vocabulary * DENSE.hidden
    more = memory(t)["parameters"] - memory(wide)["parameters"]
    assert float(more[0]) == pytest.approx(copies * linear, rel=1e-3, abs=1)
    tokens, inputs = 4096, 2 * DENSE.hidden + DENSE.ffn
    result = DENSE.heads * DENSE.head_dim * (kept if kept < 2 else 0)
    less = DENSE.layers * tokens * ((2 - kept) * inputs - result)
    fewer = memory(wide)["activations"] - memory(t)["activations"]
    assert float(fewer[0]) == pytest.approx(less, rel=1e-6, abs=1)
    # Where weights are split for good, copies are of the layer at work.
    split = memory(table(DENSE, work={"precision": precision}, zero=3))
    assert split["parameters"] == memory(table(DENSE, zero=3))["parameters"]


def test_fewer_bits_are_no_slower_on_blackwell() -> None:
    for preset in ("b200x8", "gb300x8"):
        seconds = [
            float(seconds_by_kind(table(DENSE, preset, work={"precision": name}), K)["products"][0])
            for name in ("bf16", "fp8", "nvfp4")
        ]
        assert seconds[0] > seconds[1] > seconds[2]
    mx, plain = (estimate(table(DENSE, "b200x8", work={"precision": name}), K) for name in ("mxfp8", "fp8"))
    assert mx.seconds > plain.seconds
    assert mx.peak > plain.peak


@pytest.mark.parametrize(("preset", "four"), [("b200", 4), ("gb200", 4), ("b300", 6), ("gb300", 6)])
def test_peaks_of_blackwell_by_format(preset: str, four: float) -> None:
    """Dense rates: 8 bits twice 16 bits; NVFP4 four times, and one and a half of that on Blackwell Ultra."""
    columns = of_cluster(Cluster.preset(preset))
    assert columns["peak8"] == 2 * columns["peak16"]
    assert columns["peak4"] == four * columns["peak16"]


def test_what_is_trained_is_said() -> None:
    assert format.trained(Workload(DENSE, 8, 4096)) == ""
    adapted = format.trained(Workload(DENSE, 8, 4096, adapter=Adapter(16, ("qkv",))))
    assert adapted == "; frozen in bf16, 884.7K trained in adapters of rank 16 on qkv"
    assert "with a module for one token more" in format.trained(
        Workload(DENSE, 8, 4096, prediction_modules=1)
    )
