"""A small vision-language model that learns to name what it sees, with its image encoder and its language model on
devices of their own: the same script on one device and on several.

python examples/own_submodels.py
torchrun --nproc-per-node 3 examples/own_submodels.py '{vision: {devices: 1}, language: {axes: {tensor: 2}}}'
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import yaml
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import hyper_parallel as hp
from hyper_parallel.integration.hf_folder import write_folder

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
SHAPES = ("bar", "disc", "cross", "ring")
IMAGE, SIZE, PATCH = 16, 16, 4
"""The token of a patch, and pixels of an image and of a patch."""


def build() -> LlavaForConditionalGeneration:
    """With new weights, the same on every rank."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**size, image_size=SIZE, patch_size=PATCH)
    text = LlamaConfig(**size, vocab_size=32)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    )


def draw(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Images of one coloured shape each, and what they show: ``patches… colour shape``."""
    draws = torch.Generator().manual_seed(seed)
    colour = torch.randint(len(COLOURS), (rows,), generator=draws)
    shape = torch.randint(len(SHAPES), (rows,), generator=draws)
    middle = torch.randint(5, 11, (rows, 2, 1, 1), generator=draws)
    radius = torch.randint(3, 6, (rows, 1, 1), generator=draws)
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    away = (grid - middle).abs()
    across, round_ = away.amax(1), away.float().norm(dim=1)
    masks = torch.stack(
        [
            (away[:, 0] <= 1) & (across <= radius),
            round_ <= radius,
            (away.amin(1) <= 0) & (across <= radius),
            (round_ <= radius) & (round_ > radius - 2),
        ]
    )
    mask = masks[shape, torch.arange(rows)].float()
    pixels = torch.tensor(list(COLOURS.values()))[colour][:, :, None, None] * mask[:, None]
    pixels = pixels + 0.1 * torch.randn(rows, 3, SIZE, SIZE, generator=draws)
    ids = torch.full((rows, (SIZE // PATCH) ** 2 + 2), IMAGE)
    ids[:, -2], ids[:, -1] = colour, len(COLOURS) + shape
    labels = torch.full_like(ids, -100)
    labels[:, -3], labels[:, -2] = ids[:, -2], ids[:, -1]
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}


def accuracy(model: torch.nn.Module, rows: int = 512) -> float:
    """The share of new images of which both words are right."""
    batch = draw(rows, seed=10**6)
    labels = batch.pop("labels")
    with torch.no_grad():
        found = model.eval()(**batch, use_cache=False).logits.argmax(-1)
    return float((found[:, -3:-1] == labels[:, -3:-1]).all(1).float().mean())


def train(steps: int, declared: dict[str, dict[str, object]]) -> tuple[float, float, float]:
    """Losses of the first and the last step, and the accuracy."""
    model, rows, count = build(), 16, 4
    vision = {"modules": ["model.vision_tower", "model.multi_modal_projector"], **declared.get("vision", {})}
    if declared:
        parts = hp.submodels(
            model, {**declared, "vision": vision}, draw(rows * count, seed=0), micro_batches=count
        )
        handle, step_of = parts.handle, parts.forward_backward
    else:
        handle = hp.sharded(hp.parallelize(model, hp.Strategy()))
        step_of = lambda batch, step: whole(model, batch)  # noqa: E731
    optimizer = torch.optim.AdamW([one.parameter for one in handle.owned()], lr=2e-3, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    losses = []
    for step in range(steps):
        losses.append(float(step_of(draw(rows * count, seed=1 + step), step=step)))
        handle.clip(handle.grad_norm(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as made:
        folder = [made]
        if declared:
            dist.broadcast_object_list(folder)
        write_folder(handle, folder[0])
        found = accuracy(LlavaForConditionalGeneration.from_pretrained(folder[0]))
        if declared:
            dist.barrier()
    return losses[0], losses[-1], found


def whole(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward pass on one device; the loss."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model.train()(**batch, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    declared = yaml.safe_load(sys.argv[1]) if len(sys.argv) > 1 else {}
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    if declared:
        dist.init_process_group("gloo")
    first, last, right = train(steps, declared)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"loss {first:.4f} at the first step, {last:.4f} at the last; right {right:.3f}\n")
    if declared:
        dist.destroy_process_group()
