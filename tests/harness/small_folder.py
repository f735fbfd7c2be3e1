"""A small Transformers folder with a tokenizer, for commands that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hyper_parallel.data.tokenizer import END_OF_TEXT, PAD, train


def save_small_llama(folder: Path, scale: float = 1.0) -> None:
    """Write `model`, of 300 tokens and 512 positions, to a folder. `scale`: of its weights.
    Above 1 logits are farther apart."""
    text = [f"def f{i}(x):\n    return x + {i}\n" for i in range(500)]
    (folder / "tokenizer.json").write_text(train(text, sum(map(len, text)), 300))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END_OF_TEXT, pad_token=PAD
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, vocab_size=300, num_attention_heads=4, max_position_embeddings=512)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder / "model")
