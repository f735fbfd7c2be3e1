"""Mixture-of-experts families under strategies, all ranks in one process, against one device: gradients of every
weight, the experts' loads, the auxiliary loss."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from moe import FAMILIES, assert_same_step, one_device_step, simulated_step

from hyper_parallel.strategy import Strategy
from shard.families import cells

FEATURES = {"*.experts": "expert_tensor"}

STRATEGIES: dict[str, dict[str, Any]] = {
    "shard 2": {"axes": {"shard": 2}},
    "shard 2 expert 2": {"axes": {"shard": 2, "expert": 2}},
    "replicate 2 shard 4 expert 2": {"axes": {"replicate": 2, "shard": 4, "expert": 2}},
    "shard 8 expert 8": {"axes": {"shard": 8, "expert": 8}},
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 2 sequence": {"axes": {"tensor": 2}, "sequence": True},
    "tensor 2 whole experts": {"axes": {"tensor": 2}, "rules": {"*.experts": "replicate"}},
    "tensor 2 whole experts sequence": {
        "axes": {"tensor": 2},
        "rules": {"*.experts": "replicate"},
        "sequence": True,
    },
    "tensor 2 expert 2": {"axes": {"tensor": 2, "expert": 2}},
    "shard 2 tensor 2 expert 4": {"axes": {"shard": 2, "tensor": 2, "expert": 4}},
    "tensor 2 shard 2 expert 2 sequence": {
        "axes": {"tensor": 2, "shard": 2, "expert": 2},
        "sequence": True,
    },
    "shard 2 tensor 4 expert 8 sequence recompute": {
        "axes": {"shard": 2, "tensor": 4, "expert": 8},
        "sequence": True,
        "memory": {"recompute": "layer"},
    },
    "shard 4 tensor 2 expert 2 features": {
        "axes": {"shard": 4, "tensor": 2, "expert": 2},
        "rules": FEATURES,
    },
    "shard 2 tensor 2 expert 2 features sequence": {
        "axes": {"shard": 2, "tensor": 2, "expert": 2},
        "rules": FEATURES,
        "sequence": True,
    },
    "tensor_x 2 tensor_y 2": {"axes": {"tensor_x": 2, "tensor_y": 2}},
    "shard 2 tensor_y 2 tensor_x 2 expert 8": {
        "axes": {"shard": 2, "tensor_y": 2, "tensor_x": 2, "expert": 8},
    },
    "tensor_x 2 tensor_y 2 shard 2 expert 2 features": {
        "axes": {"tensor_x": 2, "tensor_y": 2, "shard": 2, "expert": 2},
        "rules": FEATURES,
    },
    "shard 4 replicate 2 expert 2": {"axes": {"shard": 4, "replicate": 2, "expert": 2}},
    "shard 4 expert 4 replicas recompute": {
        "axes": {"shard": 4, "expert": 4},
        "expert_replicas": {"*.experts": [6, 1]},
        "memory": {"recompute": "layer"},
    },
    "shard 4 expert 4 balanced recompute": {
        "axes": {"shard": 4, "expert": 4},
        "expert_balance": {"replicas": 2},
        "memory": {"recompute": "layer"},
    },
    "shard 2 tensor 2 expert 2 features replicas": {
        "axes": {"shard": 2, "tensor": 2, "expert": 2},
        "rules": FEATURES,
        "expert_replicas": {"*.experts": [3]},
    },
}

SAMPLE = {
    ("mixtral", "shard 2"),
    ("mixtral", "shard 4 expert 4 replicas recompute"),
    ("qwen2-moe", "shard 4 expert 4 balanced recompute"),
    ("mixtral", "tensor 2 whole experts sequence"),
    ("mixtral", "tensor 2 whole experts"),
    ("qwen2-moe", "tensor 2 shard 2 expert 2 sequence"),
    ("qwen2-moe", "tensor 2 sequence"),
    ("qwen3-moe", "shard 4 tensor 2 expert 2 features"),
    ("qwen3-moe", "shard 2 tensor 2 expert 2 features replicas"),
    ("deepseek-v3", "shard 2 tensor 2 expert 4"),
    ("deepseek-v3", "replicate 2 shard 4 expert 2"),
    ("gpt-oss", "shard 8 expert 8"),
    ("gpt-oss", "shard 2 tensor 2 expert 2 features sequence"),
    ("gpt-oss", "tensor 2"),
    ("glm4-moe", "shard 2 tensor 4 expert 8 sequence recompute"),
    ("olmoe", "shard 2 expert 2"),
    ("mixtral", "shard 2 tensor_y 2 tensor_x 2 expert 8"),
    ("qwen2-moe", "tensor_x 2 tensor_y 2 shard 2 expert 2 features"),
    ("qwen3-moe", "shard 4 replicate 2 expert 2"),
}

# OLMoE norms queries and keys over all heads at once, which the tensor axes cannot split.
REFUSED = {("olmoe", name) for name in STRATEGIES if "tensor" in name}

expected_step = functools.cache(one_device_step)


@pytest.mark.parametrize(("family", "name"), cells(FAMILIES, STRATEGIES, SAMPLE, REFUSED))
def test_experts_compute_what_one_device_computes(family: str, name: str) -> None:
    got = simulated_step(family, Strategy(**STRATEGIES[name]), output_router_logits=True)
    assert_same_step(got, expected_step(family, output_router_logits=True))
