"""Small models with new weights for the tests of generation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.families import FAMILIES, WITH_IMAGES

DECODERS = sorted(set(FAMILIES) - set(WITH_IMAGES))
"""The families of the training matrix that read text alone."""


@functools.cache
def small(name: str, **changes: Any) -> nn.Module:
    """A family of the matrix, with more positions than training needs."""
    fields = {**FAMILIES[name], "max_position_embeddings": 512, **changes}
    kind, attention = fields.pop("model_type"), fields.pop("attn_implementation", "sdpa")
    return made(kind, fields, attention)


def made(kind: str, fields: dict[str, Any], attention: str = "sdpa", seed: int = 0) -> nn.Module:
    """A model that no token ends."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **fields)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    # Logits that are far enough apart for a greedy choice.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


def prompts(model: Any, lengths: tuple[int, ...] = (1, 3, 31, 32, 33, 70, 5, 12)) -> list[list[int]]:
    """Random prompts, on both sides of a page's end."""
    draws = torch.Generator().manual_seed(1)
    most = model.config.get_text_config().vocab_size
    return [torch.randint(most, (length,), generator=draws).tolist() for length in lengths]
