"""New weights and dropout are functions of the seed, the step and the row, whatever devices the submodels have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from harness.ranks import run_ranks
from harness.submodel_models import MODELS
from hyper_parallel.step.submodels import submodels

VISION = {"modules": ["model.vision_tower", "model.multi_modal_projector"]}
DECLARED = {
    3: {"vision": VISION, "language": {"axes": {"tensor": 2}}},
    4: {"language": {"axes": {"pipeline": 2}}, "vision": {**VISION, "axes": {"shard": 2}}},
}


def _losses(rank: int, world: int, declared: Any) -> list[float]:
    made = MODELS["llava"]
    with torch.device("meta"):
        model = made.build().train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.2
    batch = made.draw(4)
    parts = submodels(model, declared, batch, micro_batches=2, seed=7)
    hp.init_weights(model, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        found.append(float(parts.forward_backward(batch, step=step)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_losses_are_the_same_on_other_devices() -> None:
    one, other = (run_ranks(_losses, world, declared)[0] for world, declared in DECLARED.items())
    assert one == pytest.approx(other, rel=1e-5)
    assert len(set(one)) == 3
