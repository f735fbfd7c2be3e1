"""Real workers over gloo, FSDP2 with a mesh of its own for experts, against one device."""

from __future__ import annotations

import pytest
from moe import Step, assert_same_step, filled, one_device_step, step

from harness import run_ranks
from hyper_parallel.strategy import Strategy

CASES = {
    "shard 4 expert 2": ("mixtral", {"axes": {"shard": 4, "expert": 2}}, 2),
    "shard 4 expert 4": ("deepseek-v3", {"axes": {"shard": 4, "expert": 4}}, 1),
    "replicate 2 shard 2 expert 2": ("gpt-oss", {"axes": {"replicate": 2, "shard": 2, "expert": 2}}, 2),
    "shard 2 tensor 2 expert 4 sequence": (
        "qwen2-moe",
        {"axes": {"shard": 2, "tensor": 2, "expert": 4}, "sequence": True},
        1,
    ),
    "shard 2 tensor 2 expert 2 features replicas": (
        "mixtral",
        {
            "axes": {"shard": 2, "tensor": 2, "expert": 2},
            "rules": {"*.experts": "expert_tensor"},
            "expert_replicas": {"*.experts": [0, 5]},
        },
        1,
    ),
    "shard 4 tensor 2 expert 2 recompute": (
        "qwen3-moe",
        {"axes": {"shard": 4, "tensor": 2, "expert": 2}, "memory": {"recompute": "layer"}},
        2,
    ),
    # 2 local experts over the 4 ranks that share their storage: dim 1 is split.
    "shard 8 expert 2 of 4": (
        "mixtral",
        {"axes": {"shard": 8, "expert": 2}},
        1,
    ),
}


def _rank(rank: int, world: int, name: str) -> list[Step]:
    """By FSDP2 and by the traceable lowering."""
    family, declared, micro_batches = CASES[name]
    strategy = Strategy(**declared, check=False)
    models = [filled(family, strategy, lowering, **_more(name)) for lowering in ("fsdp", "traceable")]
    return [step(model, strategy, micro_batches) for model in models]


def _more(name: str) -> dict[str, object]:
    more = {"num_local_experts": 4, "intermediate_size": 24} if name.endswith("of 4") else {}
    return {"output_router_logits": True, **more}


@pytest.mark.parametrize("name", CASES)
def test_workers_compute_what_one_device_computes(name: str) -> None:
    family, declared, micro_batches = CASES[name]
    # The auxiliary loss is that of a micro-batch, which one device must cut the same way.
    expected = one_device_step(family, **_more(name)) if micro_batches == 1 else None
    world = Strategy(**declared).axes.world
    for fsdp, traceable in run_ranks(_rank, world, name):
        assert_same_step(fsdp, traceable if expected is None else expected)
        assert_same_step(traceable, fsdp)
