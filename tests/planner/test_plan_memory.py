"""Bytes of a rank: against counts by hand, against published peaks, and how they answer to each column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import Profile, code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import KINDS, fits, memory
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.mixers import Latent
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

GIB = 2**30
H100, B200 = Cluster.preset("h100"), Cluster.preset("b200")
SMALL = Shape("small", 4, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=1000)
LLAMA_70B_L12 = Shape("llama3-70b-L12", 12, 8192, 64, 8, 128, ffn=28672, gated=True, vocabulary=128256)
LLAMA_405B_L4 = Shape("llama3-405b-L4", 4, 16384, 128, 16, 128, ffn=53248, gated=True, vocabulary=128256)
DEEPSEEK_V3_L4 = Shape(
    "deepseekv3-L4", 4, 7168, 128, 128, 128, ffn=18432, gated=True, vocabulary=129280, experts=256, chosen=8,
    expert_ffn=2048, shared_ffn=2048, dense_layers=1, latent=Latent(1536, 512, 128, 64, 128),
)  # fmt: skip
NANOTRON = Profile(name="nanotron", source="its configs", fused=0, balanced=1, greedy=1, logit_bytes=12)
NANOTRON_8B = Shape("nanotron-8B", 32, 4096, 32, 32, 128, ffn=14336, gated=True, vocabulary=131072)
NANOTRON_1B = Shape("nanotron-1B", 16, 2048, 32, 32, 64, ffn=8192, gated=True, vocabulary=131072, tied=True)


def table(shape: Shape = SMALL, batch: int = 8, sequence: int = 128, **spread: Any) -> Table:
    return Table.of(Workload(shape, batch, sequence), H100, GENERIC, **spread)


def peak(t: Table) -> Any:
    return sum(memory(t).values())


def test_one_device_against_a_count_by_hand() -> None:
    kinds = memory(table())
    layer = 64 * 16 * (4 + 2 * 2) + 4 * 16 * 64 + 3 * 64 * 256 + 2 * 64
    parameters = 4 * layer + 2 * 1000 * 64
    assert kinds["parameters"] == 2 * parameters
    assert kinds["gradients"] == 4 * parameters
    assert kinds["optimizer"] == 12 * parameters
    assert kinds["gathered"] == 2 * layer, "a gradient of each shape, in the weights' format"
    token = 2 * 2 * 64 + 2 * 2 * 64 + 2 * (4 + 4) * 16 + 2 * 4 * 16 + 4 * 4 + 6 * 256
    assert kinds["activations"] == 128 * (4 * token + 2 * 64)
    assert kinds["logits"] == 128 * 1000 * 8
    assert kinds["working"] == 0, "less than the logits, which are gone by then"
    assert set(kinds) == set(KINDS)


def test_korthikantis_layer() -> None:
    """GPT-3's layer keeps 34 s b h + 5 a s² b (arXiv 2205.05198, section 4.1), of which dropouts' masks are 2."""
    shape = Shape("gpt", 1, 1024, 16, 16, 64, ffn=4096, gated=False, vocabulary=10)
    flash = memory(table(shape, 1, 256))["activations"]
    eager = memory(table(shape, 1, 256).replaced(flash=0))["activations"]
    assert flash == 256 * ((34 - 2) * 1024 + 4 * 16 + 2 * 1024), (
        "with the softmax' sums, and the layer's result"
    )
    assert eager - flash == 5 * 16 * 256**2
    again = memory(table(shape, 1, 256, recompute=code("recompute", "selective")).replaced(flash=0))
    assert again["activations"] == flash


def test_zero_splits_one_kind_after_another() -> None:
    whole = memory(table(shard=4, zero=0))
    for level, kind in ((1, "optimizer"), (2, "gradients"), (3, "parameters")):
        below, split = memory(table(shard=4, zero=level - 1)), memory(table(shard=4, zero=level))
        assert below[kind] == whole[kind]
        assert split[kind] == whole[kind] / 4
    layer = (whole["parameters"] / 2 - 2 * 1000 * 64) / 4
    assert memory(table(shard=4, zero=3))["gathered"] == 6 * layer, "two layers' weights and one's gradient"
    assert memory(table(zero=3))["gathered"] == 0, "there is nothing to gather on one rank"


def test_experts_are_split_over_the_ranks_that_hold_them() -> None:
    shape = Shape("routed", 2, 64, 4, 4, 16, 256, True, 1000, experts=8, chosen=2, expert_ffn=128)
    one = memory(table(shape, shard=8, zero=1))
    spread = memory(table(shape, shard=8, zero=1, expert=8))
    experts = 2 * 8 * 3 * 64 * 128
    assert one["parameters"] - spread["parameters"] == pytest.approx(2 * experts * 7 / 8)
    # Whole or spread, eight ranks hold the state of all experts once.
    assert one["optimizer"] == pytest.approx(spread["optimizer"])
    tensor = memory(table(shape, shard=4, tensor_y=2, zero=1, expert=8))
    assert tensor["gradients"] < spread["gradients"], "the tensor axis folds into the expert axis"


def test_a_layer_of_experts_against_a_count_by_hand() -> None:
    shape = Shape(
        "routed", 1, 64, 4, 4, 16, 256, True, 10, experts=8, chosen=2, expert_ffn=128, shared_ffn=32
    )
    kinds = memory(table(shape, shard=2, expert=2, zero=1))
    besides = 4 * 64 * 64 + 2 * 64 + 3 * 64 * 32 + 8 * 64
    expert, tables = 3 * 64 * 128, 2 * 10 * 64
    assert kinds["parameters"] == 2 * (besides + 4 * expert + tables)
    assert kinds["optimizer"] == 12 * ((besides + tables) / 2 + 4 * expert), (
        "experts' other rank has other experts"
    )
    assert kinds["gathered"] == 2 * (besides + expert), "one gradient serves experts of one shape"
    attention = 2 * (4 + 2 * 4) * 16 + 2 * 4 * 16 + 4 * 4
    token = 8 * 64 + attention + 2 * (2 * 64 + 6 * 128) + 6 * 32 + 8 * 8
    assert kinds["activations"] == 128 * (token + 2 * 64)


def test_latent_attention_against_a_count_by_hand() -> None:
    latent = Latent(query_rank=24, key_rank=16, plain=8, rotary=4, value=6)
    shape = Shape("latent", 1, 64, 4, 4, 16, ffn=256, gated=True, vocabulary=10, latent=latent)
    plain = Shape("plain", 1, 64, 4, 4, 16, ffn=256, gated=True, vocabulary=10)
    latents = 2 * 2 * (24 + 16) + 2 * 4
    heads = 4 * 2 * (12 + 12 + 6 + 6)
    less = 2 * (4 + 2 * 4) * 16 + 2 * 4 * 16
    found = memory(table(shape))["activations"] - memory(table(plain))["activations"]
    assert found == 128 * (latents + heads - less)
    unfused = [memory(table(one).replaced(fused=0))["activations"] for one in (shape, plain)]
    # Queries before they were rotated, and the keys' part without position; of the plain model, both whole.
    assert unfused[0] - unfused[1] - found == 128 * (4 * 2 * (12 + 8) - 2 * 2 * 4 * 16)


def test_a_tied_head_is_held_once_on_one_device_and_on_both_ends_of_a_pipeline() -> None:
    tied = Shape("tied", 4, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=1000, tied=True)
    untied, saved = memory(table()), memory(table(tied))
    assert untied["parameters"] - saved["parameters"] == 2 * 1000 * 64
    staged, both = memory(table(pipeline=4)), memory(table(tied, pipeline=4))
    assert staged["parameters"] == both["parameters"]


def test_tensor_and_sequence_parallel_split_activations() -> None:
    plain = memory(table())["activations"] - 128 * 2 * 64
    tensor = memory(table(tensor_x=2))["activations"] - 128 * 2 * 64
    both = memory(table(tensor_y=2, sequence_parallel=1))["activations"] - 128 * 64
    outside = 128 * 4 * 8 * 64
    assert tensor == outside + (plain - outside) / 2
    assert both == plain / 2
    two = memory(table(tensor_x=2, tensor_y=2))["activations"]
    assert two == memory(table(tensor_x=4, sequence_parallel=1))["activations"], (
        "two axes split what lies outside"
    )
    kept = memory(table(tensor_y=2, sequence_parallel=1).replaced(regathers=0))["activations"]
    again = memory(table(tensor_y=2, sequence_parallel=1))["activations"]
    assert kept - again == 128 * 4 * 2 * 64, "the inputs of two products, in place of their halves"
    unfused = memory(table(tensor_y=2, sequence_parallel=1).replaced(fused=0))["activations"]
    assert unfused - again == 128 * 4 * (2 * (2 + 1) * 16 + 256), (
        "queries and keys twice; the gate's activation"
    )


@pytest.mark.parametrize(
    ("schedule", "virtual", "waiting"),
    [
        ("1f1b", 1, 4),
        ("gpipe", 1, 8),
        ("interleaved", 2, 4 + 3 / 2),
        ("zb-h1", 1, 4),
        ("zb-v", 2, 4),
        ("dualpipe", 2, 5),
    ],
)
def test_micro_batches_that_wait_on_the_first_stage(schedule: str, virtual: int, waiting: float) -> None:
    shape = Shape("deep", 16, 64, 4, 4, 16, 256, True, vocabulary=8)
    spread = {"pipeline": 4, "virtual": virtual, "schedule": code("schedule", schedule)}
    one = memory(table(shape, 1, 128))
    staged = memory(table(shape, 8, 128, **spread))
    result = 128 * 2 * 64
    stages = 2 if schedule == "dualpipe" else 1
    per_stage = (one["activations"] - result) / 4 * stages
    assert staged["activations"] == pytest.approx(waiting / stages * (per_stage + result))


def test_few_micro_batches_wait_for_no_more() -> None:
    shape = Shape("headless", 4, 64, 4, 4, 16, 256, True, vocabulary=8)
    few = memory(table(shape, batch=2, pipeline=4))["activations"]
    many = memory(table(shape, batch=64, pipeline=4))["activations"]
    assert many == 2 * few


def test_the_last_stage_is_the_fullest_where_the_head_is_large() -> None:
    shape = Shape("wide", 4, 64, 4, 4, 16, 256, True, vocabulary=100_000)
    staged = memory(table(shape, pipeline=4))
    assert staged["logits"] == 128 * 100_000 * 8
    assert memory(table(pipeline=4))["logits"] == 0, "of the first stage, which has more activations"
    assert memory(table(shape, pipeline=4).replaced(logit_bytes=4))["logits"] == staged["logits"] / 2


def test_full_recompute_keeps_inputs_and_one_layer() -> None:
    full = {"recompute": code("recompute", "full")}
    every = memory(table(**full))
    assert every["activations"] == 128 * 2 * 64 * (4 + 1)
    half = memory(table(**full, recomputed=0.5))["activations"]
    assert half == (every["activations"] + memory(table())["activations"]) / 2
    shape = Shape("narrow", 4, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=10)
    assert memory(table(shape, **full))["working"] > memory(table(shape))["working"]


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    kinds, offloaded = memory(table()), memory(table(state_on_host=1, activations_on_host=0.5))
    assert offloaded["optimizer"] == 0
    assert offloaded["activations"] == kinds["activations"] / 2


def test_eight_bits_keep_less_of_inputs_and_two_bytes_of_weights() -> None:
    wide, narrow = memory(table()), memory(table().replaced(precision=code("precision", "fp8")))
    # Inputs of four products in one byte; attention's result is kept for its own gradient as well.
    assert wide["activations"] - narrow["activations"] == 128 * 4 * (2 * 64 - 4 * 16 + 256)
    assert narrow["parameters"] == wide["parameters"]


def test_rows_of_a_table_are_what_they_are_alone() -> None:
    spread = {
        "shard": [1, 2, 4, 1],
        "pipeline": [4, 1, 2, 4],
        "zero": [0, 1, 3, 1],
        "recompute": [0, 0, 2, 1],
    }
    all_at_once = memory(table(**spread))
    for row in range(4):
        alone = memory(table(**spread).take(row))
        for kind in KINDS:
            assert np.broadcast_to(all_at_once[kind], 4)[row] == pytest.approx(float(alone[kind][0])), kind


# Published: SimuMax, docs/b200 (maximum over all ranks of max_memory_allocated, Megatron-LM 0.14, GiB).
@pytest.mark.parametrize(
    ("shape", "sequence", "spread", "measured"),
    [
        (LLAMA_70B_L12, 4096, {"pipeline": 2, "shard": 4}, 66.55),
        (LLAMA_70B_L12, 4096, {"tensor_y": 2, "shard": 4}, 60.68),
        (LLAMA_70B_L12, 4096, {"tensor_y": 8}, 28.29),
        (LLAMA_70B_L12, 32768, {"context": 8}, 104.51),
        (LLAMA_405B_L4, 4096, {"tensor_y": 4, "shard": 2}, 52.89),
        (LLAMA_405B_L4, 131072, {"tensor_y": 2, "context": 4}, 118.13),
        (DEEPSEEK_V3_L4, 4096, {"shard": 8, "expert": 8}, 104.3),
        (DEEPSEEK_V3_L4, 4096, {"pipeline": 2, "shard": 4, "expert": 4}, 114.0),
    ],
)
def test_published_peaks_of_megatron(
    shape: Shape, sequence: int, spread: dict[str, int], measured: float
) -> None:
    workload = Workload(shape, batch=16, sequence=sequence)
    parallel = float(spread.get("tensor_y", 1) > 1)
    found = peak(Table.of(workload, B200, GENERIC, **spread, zero=1, sequence_parallel=parallel))
    assert float(found[0]) / GIB == pytest.approx(measured, rel=0.06)


# Published: the Ultra-Scale Playbook's interactive figure (nanotron on H100s, GB as printed).
@pytest.mark.parametrize(
    ("shape", "spread", "measured"),
    [
        (NANOTRON_1B, {"shard": 8, "micro": 2}, 50.2),
        (NANOTRON_1B, {"shard": 8, "micro": 1, "zero": 1}, 24.2),
        (NANOTRON_8B, {"pipeline": 8, "shard": 16, "zero": 1}, 45.7),
        (NANOTRON_8B, {"pipeline": 16, "shard": 8, "zero": 1}, 50.8),
        (NANOTRON_8B, {"pipeline": 2, "tensor_y": 8, "shard": 8, "micro": 4, "zero": 1}, 20.1),
        (NANOTRON_8B, {"pipeline": 4, "tensor_y": 2, "shard": 16, "micro": 2, "zero": 1}, 43.5),
    ],
)
def test_published_peaks_of_nanotron(shape: Shape, spread: dict[str, int], measured: float) -> None:
    parallel = float(spread.get("tensor_y", 1) > 1)
    t = Table.of(Workload(shape, 256, 4096), H100, NANOTRON, **spread, sequence_parallel=parallel)
    assert float(peak(t)[0]) / GIB == pytest.approx(measured, rel=0.12)


def test_what_fits() -> None:
    k = Constants(slack=1.1, outside=1e9)
    t = table(pipeline=[1, 4])
    assert fits(t, np.array([71e9, 71e9]), k).tolist() == [True, True]
    assert fits(t, np.array([72e9, 72e9]), k).tolist() == [False, False]
    assert fits(table(pipeline=8), np.array([1e9]), k).tolist() == [False], "four layers, eight stages"


def test_a_run_whose_last_ranks_stay_empty_does_not_fit() -> None:
    """Cut by cost, the head of the 1B model is worth four layers: 16 stages are not all reached, and it crashed."""
    t = Table.of(Workload(NANOTRON_1B, 256, 4096), H100, NANOTRON, pipeline=[8, 16], shard=4, zero=1)
    assert fits(t, np.zeros(2), Constants()).tolist() == [True, False]
    few = Table.of(Workload(NANOTRON_1B, 6, 4096), H100, NANOTRON, pipeline=8)
    assert fits(few, np.zeros(1), Constants()).tolist() == [False], "six micro-batches, eight stages"
