"""Placed strategies whose axes span nodes, against one device: simulated ranks and real workers."""

from __future__ import annotations

from typing import Any

import pytest

from harness import run_ranks
from harness.equivalence import build_model, draw_batch, family_config, one_device, run_cell
from harness.families import FAMILIES
from hyper_parallel.verify.report import compare
from hyper_parallel.verify.run import step_of
from hyper_parallel.verify.step import StepOutcome

PLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor over two nodes, sequence": (
        "llama",
        {
            "axes": {"shard": 2, "tensor": 4},
            "placement": {"node": ["tensor"], "network": ["shard"], "devices": {"node": 2}},
            "sequence": True,
        },
    ),
    "shard over two nodes, turned": (
        "qwen3",
        # The keys are in another order than the levels: placement puts tensor inside.
        {
            "axes": {"tensor": 2, "shard": 4},
            "placement": {"node": ["tensor"], "supernode": ["shard"], "devices": {"node": 4}},
        },
    ),
    "three levels": (
        "phi3",
        {
            "axes": {"shard": 8},
            "placement": {"node": ["shard"], "devices": {"node": 2, "supernode": 4}},
        },
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_simulated_ranks_compute_what_one_device_computes(name: str) -> None:
    family, strategy = PLACED[name]
    batch = draw_batch({"vocab_size": 131})
    one = one_device(FAMILIES[family], strategy, batch)
    report = run_cell(family_config(FAMILIES[family], strategy), build_model(FAMILIES[family]), batch, one)
    assert report.failures == []


def _steps(rank: int, world: int, ones: dict[str, StepOutcome]) -> list[list[str]]:
    failures = []
    for name, (family, strategy) in PLACED.items():
        config = family_config(FAMILIES[family], {**strategy, "check": False})
        batch, one = draw_batch({"vocab_size": 131}), ones[name]
        many = step_of(build_model(FAMILIES[family]), config, config.strategy, batch, "fsdp", one.gradients)
        failures.append(compare(one, many, name, "gloo", "float32").failures)
    return failures


def test_real_workers_compute_what_one_device_computes() -> None:
    batch = draw_batch({"vocab_size": 131})
    ones = {name: one_device(FAMILIES[family], {}, batch) for name, (family, _) in PLACED.items()}
    assert run_ranks(_steps, 8, ones, timeout=120) == [[[]] * len(PLACED)] * 8
