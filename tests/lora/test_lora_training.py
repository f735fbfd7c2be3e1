"""Adapters trained by real workers with FSDP2: frozen weights get no gradient, no state and no update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.strategy import Strategy
from lora.adapted import adapt, one_device_step
from shard.families import Step, build, step

CASES = [
    ("llama", {"axes": {"shard": 2, "tensor": 2}}),
    ("gpt2-dropout", {"axes": {"replicate": 2, "shard": 2}, "memory": {"recompute": "layer"}}),
    ("qwen2.5-vl", {"axes": {"tensor": 2, "shard": 2}, "sequence": True}),
]


def _trained(rank: int, world: int, family: str, declared: dict[str, Any]) -> tuple[Step, set[str], set[str]]:
    strategy = Strategy(**declared, check=False)
    model = adapt(build(family))
    shard.parallelize(model, strategy)
    shard.init_weights(model, seed=1)
    got = step(model, strategy)
    handle = shard.sharded(model)
    optimizer = build_optimizer(model, AdamWConfig(lr=0.1))
    optimizer.step(1.0)
    after = {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}
    moved = {name for name, value in after.items() if not torch.equal(value, got.values[name])}
    return got, moved, set(optimizer.pieces())


@pytest.mark.parametrize(("family", "declared"), CASES)
def test_workers_train_the_adapters_and_nothing_else(family: str, declared: dict[str, Any]) -> None:
    expected = one_device_step(family)
    adapters = {name for name in expected.values if "lora_" in name}
    for got, moved, state in run_ranks(_trained, 4, family, declared):
        assert got.loss == pytest.approx(expected.loss, abs=2e-6)
        assert got.norm == pytest.approx(expected.norm, rel=1e-5)
        assert got.gradients.keys() == adapters
        assert moved == adapters
        assert state == {
            f"optimizer.{kind}.{name}" for name in adapters for kind in ("exp_avg", "exp_avg_sq")
        }
        for name, gradient in expected.gradients.items():
            scale = max(float(gradient.abs().max()), 1e-4 * expected.norm)
            worst = float((got.gradients[name] - gradient).abs().max()) / scale
            assert worst < 1e-5, f"gradient of {name} is off by {worst:.1e}"
