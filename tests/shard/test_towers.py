"""A vision tower that some ranks' rows do not need: nobody waits, and the gradients are those of one device."""

from __future__ import annotations

import torch

from harness import run_ranks
from harness.equivalence import build_model, draw_batch
from harness.families import FAMILIES
from hyper_parallel import shard
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.vision_and_audio_towers import towers_of
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.step import inputs_of

VISION = FAMILIES["qwen2.5-vl"]


def gradients(rank: int, world: int, images: tuple[bool, bool]) -> dict[str, torch.Tensor]:
    """Of two rows, each with an image or none; with two ranks each computes one of them."""
    strategy = Strategy(axes={"shard": world})
    model = build_model(VISION)
    shard.parallelize(model, strategy)
    shard.init_weights(model, seed=0)
    handle, batch = shard.sharded(model), draw_batch(VISION, rows=2)
    batch["input_ids"][~torch.tensor(images)] %= 100
    rows = [handle.data_index] if world == 2 else [0, 1]
    for row in rows:
        mine = {key: x[row : row + 1] for key, x in batch.items()}
        if not images[row]:
            del mine["pixel_values"], mine["image_grid_thw"]
        labels = mine.pop("labels")
        with handle.micro_batch(rows=torch.tensor([row]), last=row == rows[-1]):
            causal_lm_loss(model, labels=labels, tokens=60, **inputs_of(mine)).backward()
    return {p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None}


def test_one_rank_has_an_image_and_the_other_none() -> None:
    for images in ((True, False), (False, False)):
        (expected,) = run_ranks(gradients, 1, images)
        for found in run_ranks(gradients, 2, images):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=5e-7)
        assert any("visual" in name for name in expected)


def test_a_language_model_has_no_towers() -> None:
    assert [type(t).__name__ for t in towers_of(build_model(VISION))] == [
        "Qwen2_5_VisionTransformerPretrainedModel"
    ]
    assert list(towers_of(build_model(FAMILIES["llama-tied"]))) == []
    assert list(towers_of(build_model(FAMILIES["gpt2"]))) == []
