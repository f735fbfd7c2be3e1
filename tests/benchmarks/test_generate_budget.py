"""Random budgets of generation that once were exceeded."""

from __future__ import annotations

import pytest
import torch

from harness.generation_budgets import case
from hyper_parallel.inference.weights import units


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(28, id="matrices of latents that a run kept"),
        pytest.param(199, id="a table in flash, looked up before the pass sees its pages"),
    ],
)
def test_the_budget_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SPLIT", units.SPLIT)  # the case sets it
    before = torch.get_num_threads()
    found = case(seed)
    torch.set_num_threads(before)
    assert found["kept"]
    assert found["same_tokens"]
