"""A small model that generates."""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


@functools.cache
def small_llama() -> nn.Module:
    """Llama that no token ends."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
