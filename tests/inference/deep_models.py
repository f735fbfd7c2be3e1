"""Models of six layers, so that some are resident and some are streamed."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from harness.families import FAMILIES
from inference.small_models import made

LAYERS = 6
WINDOW = 48


@functools.cache
def deep(name: str) -> nn.Module:
    """A family of the matrix, with six layers and windows of 48 tokens."""
    fields: dict[str, Any] = {
        **FAMILIES[name],
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 512,
    }
    if "sliding_window" in fields:
        fields["sliding_window"] = WINDOW
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"] * (LAYERS // len(fields["layer_types"]))
    kind, attention = fields.pop("model_type"), fields.pop("attn_implementation", "sdpa")
    return made(kind, fields, attention)
