"""Products of axes on real workers over gloo, with what `train` runs (FSDP2), against one device."""

from __future__ import annotations

from typing import Any

import pytest

from harness import run_ranks
from harness.equivalence import build_model, draw_batch, family_config, one_device
from harness.families import FAMILIES
from harness.small_models import small_fields
from hyper_parallel.verify.report import compare
from hyper_parallel.verify.run import step_of

CONTEXT_TENSOR = {"axes": {"context": 2, "tensor_x": 2}}
PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "context 2 × tensor 2": ("qwen3", CONTEXT_TENSOR),
    "shard 2 × context 2": ("gemma3", {"axes": {"shard": 2, "context": 2}}),
    "tensor_x 2 × tensor_y 2": ("llama", {"axes": {"tensor_x": 2, "tensor_y": 2}}),
    "shard 2 × expert 2": ("mixtral", {"axes": {"shard": 2, "expert": 2}}),
    "shard 2 × tensor 2, expert 4": ("deepseek-v3", {"axes": {"shard": 2, "tensor": 2, "expert": 4}}),
    "replicate 2 × context 2, recompute": (
        "mistral",
        {"axes": {"replicate": 2, "context": 2}, "memory": {"recompute": "layer"}},
    ),
    "context 2 × tensor 2, expert 2, sequence": (
        "gpt-oss",
        {"axes": {"context": 2, "tensor": 2, "expert": 2}, "sequence": True},
    ),
    "shard 2 × context 2 × tensor 2": (
        "gemma2",
        {"axes": {"shard": 2, "context": 2, "tensor": 2}, "sequence": True},
    ),
    "shard 2 × tensor_x 2 × tensor_y 2": ("phi3", {"axes": {"shard": 2, "tensor_x": 2, "tensor_y": 2}}),
    "replicate 2 × shard 2 × tensor 2, expert 4": (
        "qwen3-moe",
        {"axes": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 4}},
    ),
    "context 2 × tensor_x 2 × tensor_y 2, expert 8": (
        "qwen3-moe",
        {"axes": {"context": 2, "tensor_x": 2, "tensor_y": 2, "expert": 8}},
    ),
    # Its layers share weights with each other.
    "shard 2": ("zamba", {"axes": {"shard": 2}}),
    # 27 features of each expert, and 54 where two weights are one.
    "tensor 2, odd": ("odd", {"axes": {"tensor": 2}}),
    "shard 2 × tensor 2, odd": ("odd", {"axes": {"shard": 2, "tensor": 2}}),
}


def _step(rank: int, world: int, name: str) -> list[str]:
    family, strategy = PRODUCTS[name]
    odd = {**FAMILIES["qwen3-moe"], "moe_intermediate_size": 27}
    fields = odd if family == "odd" else FAMILIES.get(family) or small_fields(family)
    config = family_config(fields, strategy)
    batch = draw_batch({"vocab_size": 131})
    one = one_device(fields, {}, batch)
    many = step_of(build_model(fields), config, config.strategy, batch, "fsdp", one.gradients)
    return compare(one, many, name, "gloo", "float32").failures


@pytest.mark.parametrize("name", PRODUCTS)
def test_real_workers_compute_what_one_device_computes(name: str) -> None:
    world = family_config({"model_type": "llama"}, PRODUCTS[name][1]).strategy.axes.world
    assert run_ranks(_step, world, name) == [[]] * world
