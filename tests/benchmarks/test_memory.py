"""What a graph says of its peak is what an observer sees that knows nothing of the graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import budget
import memory
import torch
from observer import Observer

from hyper_parallel.strategy import Strategy


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("llama", {}), ("llama", {"memory": {"recompute": "layer"}}), ("qwen3-moe", {})],
)
def test_the_predicted_peak_is_exact(model: str, strategy: dict[str, Any]) -> None:
    fields = {**memory.MODELS[model], "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 128}
    found = memory.observed(fields, Strategy(**strategy), rows=2, positions=32)
    assert found["predicted"] == found["live"]


def test_the_observer_counts_a_storage_once_and_until_it_is_gone() -> None:
    x = torch.zeros(100)
    with Observer([x]) as live:
        y = x + 1
        view = y[50:]
        del y
        assert live.alive == 800
        del view
        assert live.alive == 400
        _ = x * 2
        x.untyped_storage().resize_(0)
        assert live.alive == 400  # the product
    assert live.peak == 800


def test_a_case_of_the_budget_benchmark_holds() -> None:
    case = {**budget.draw(3), "layers": 1, "positions": 32, "share": 0.2, "tiers": ("host", "flash")}
    row = budget.run_case(case)
    assert budget.check(row) == []
    assert row["moved"] > 0
