"""Small reward models as Transformers folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hyper_parallel.data.tokenizer import character_tokenizer
from hyper_parallel.rl.tasks import VOCABULARY

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEMPLATE = "{% for m in messages %}{{ m.role|length }}={{ m.content }}{{ eos_token }}{% endfor %}"
"""Of the few characters that the tokenizer has."""


def reward_folder(
    folder: Path, family: str = "llama", *, prefers: str | None = None, seed: int = 5, **fields: Any
) -> Path:
    """A model with random weights that are far from 0, and a tokenizer of digits. `prefers`: 4 · √2 for rows that end
    with this character, else 0. `fields`: of the config."""
    words = character_tokenizer(VOCABULARY)
    words.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        family, **{**SHAPE, "vocab_size": len(words), "num_labels": 1, "pad_token_id": 1, **fields}
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(0, 0.2)
        if prefers is not None:
            _prefer(model, words.convert_tokens_to_ids(prefers))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _prefer(model: Any, token: int) -> None:
    """Layers add nothing to embeddings that are orthogonal, one of which is the head's."""
    for name, value in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "score.weight")):
            value.zero_()
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.eye(*embedding.shape))
    model.score.weight[0, token] = 1.0


def plain_scores(folder: Path, rows: list[list[int]]) -> list[float]:
    """Transformers' own scores, one row at a time."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]
