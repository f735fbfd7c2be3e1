"""A checkpoint of submodels goes on with other devices for each, and as a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.ranks import run_ranks
from harness.submodel_models import MODELS
from hyper_parallel.integration.checkpoints import load, save
from hyper_parallel.integration.local_optimizer import on_local
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.submodels import submodels
from hyper_parallel.strategy import Strategy

VISION = {"modules": ["model.vision_tower", "model.multi_modal_projector"]}
FIRST = {"vision": VISION, "language": {"axes": {"tensor": 2}}}
SECOND = {"language": {"axes": {"pipeline": 2}}, "vision": {**VISION, "axes": {"shard": 2}}}


# They train the embedding together, on unlike axes.
T5 = (
    {"encoder": {"modules": ["encoder"]}, "decoder": {"axes": {"shard": 2}}},
    {"encoder": {"modules": ["encoder"], "axes": {"shard": 2}}, "decoder": {"axes": {"tensor": 2}}},
)


def _trained(
    declared: Any, folder: Path | None, steps: int, model: str = "llava"
) -> tuple[list[float], Any, Any]:
    made = MODELS[model]
    built, batch = made.build().train(), made.draw(4)
    parts = submodels(built, declared, batch, micro_batches=2)
    optimizer = torch.optim.AdamW(parts.handle.model.parameters(), lr=1e-2)
    on_local(optimizer, parts.handle)
    if folder is not None:
        load(folder, parts.handle, optimizer)
    losses = []
    for step in range(steps):
        losses.append(float(parts.forward_backward(batch, step=step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, parts.handle, optimizer


def _saves(rank: int, world: int, folder: Path, declared: Any, model: str = "llava") -> list[float]:
    _, handle, optimizer = _trained(declared, None, 2, model)
    save(folder, handle, optimizer, 2, {})
    return _trained(declared, folder, 2, model)[0]


def _goes_on(rank: int, world: int, folder: Path, declared: Any, model: str = "llava") -> list[float]:
    return _trained(declared, folder, 2, model)[0]


def _as_a_whole(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    model = parallelize(MODELS["llava"].build(), Strategy(), alone=True)
    load(folder, sharded(model), None)
    return {name: one.detach() for name, one in model.named_parameters()}


def test_a_run_goes_on_with_other_devices(tmp_path: Path) -> None:
    straight = run_ranks(_saves, 3, tmp_path, FIRST)[0]
    again = run_ranks(_goes_on, 4, tmp_path, SECOND)[0]
    assert straight[0] != straight[1]
    torch.testing.assert_close(torch.tensor(again), torch.tensor(straight), rtol=1e-5, atol=0)
    (whole,) = run_ranks(_as_a_whole, 1, tmp_path)
    first = dict(MODELS["llava"].build().named_parameters())
    moved = [name for name, one in whole.items() if not torch.equal(one, first[name])]
    assert {name.split(".")[1] for name in moved} >= {
        "vision_tower",
        "multi_modal_projector",
        "language_model",
    }


def test_a_weight_of_unlike_groups_is_saved_once(tmp_path: Path) -> None:
    straight = run_ranks(_saves, 3, tmp_path, T5[0], "t5")[0]
    again = run_ranks(_goes_on, 4, tmp_path, T5[1], "t5")[0]
    assert straight[0] != straight[1]
    torch.testing.assert_close(torch.tensor(again), torch.tensor(straight), rtol=1e-5, atol=0)
