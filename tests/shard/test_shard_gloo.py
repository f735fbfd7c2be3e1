"""Real workers over gloo give one device's loss, gradient norm, gradients and values."""

from __future__ import annotations

import pytest
import torch
from families import STRATEGIES, Step, build, one_device_step, step

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.strategy import Strategy


def _rank(rank: int, world: int, family: str, name: str, lowering: str, micro_batches: int) -> Step:
    strategy = Strategy(**STRATEGIES[name])
    model = build(family)
    shard.parallelize(model, strategy, lowering=lowering)
    shard.init_weights(model, seed=1)
    return step(model, strategy, micro_batches)


CASES = [
    ("llama", "tensor 2", "fsdp", 1),
    ("llama", "shard 2", "fsdp", 1),
    ("llama", "replicate 2", "fsdp", 2),
    ("llama", "shard 2 tensor 2", "traceable", 1),
    ("llama", "shard 2 tensor 2", "fsdp", 2),
    ("llama-tied", "tensor 4 sequence", "fsdp", 1),
    ("gemma3", "tensor 2 shard 2 sequence", "fsdp", 1),
    ("phi3", "shard 2 tensor 2", "fsdp", 1),
    ("gpt2", "replicate 2 shard 2 tensor 2 sequence recompute", "fsdp", 1),
    ("gpt2", "replicate 2 shard 2", "fsdp", 2),
]


@pytest.mark.parametrize(("family", "name", "lowering", "micro_batches"), CASES)
def test_workers_compute_what_one_device_computes(
    family: str, name: str, lowering: str, micro_batches: int
) -> None:
    world = Strategy(**STRATEGIES[name]).axes.world
    expected = one_device_step(family)
    for got in run_ranks(_rank, world, family, name, lowering, micro_batches):
        assert got.loss == pytest.approx(expected.loss, abs=2e-6)
        assert got.norm == pytest.approx(expected.norm, rel=1e-5)
        assert got.gradients.keys() == expected.gradients.keys()
        for key, gradient in expected.gradients.items():
            torch.testing.assert_close(got.values[key], expected.values[key], rtol=0, atol=0)
            torch.testing.assert_close(
                got.gradients[key], gradient, rtol=0, atol=5e-7, msg=lambda m, k=key: f"{k}: {m}"
            )
