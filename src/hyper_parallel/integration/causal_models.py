"""Causal language models of Transformers: their next-token loss, and the parameters that operations are counted by."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.shard.lora_adapters import without_adapters


def parameters_that_count(model: nn.Module) -> int:
    """Parameters that a Trainer counts operations by."""
    core: Any = without_adapters(model)
    if hasattr(core, "num_parameters"):
        return int(core.num_parameters(exclude_embeddings=True))
    return sum(parameter.numel() for parameter in core.parameters())


def has_next_token_loss(model: nn.Module) -> bool:
    """Whether the loss that a Transformers model computes by itself is that of the next token."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    core: Any = without_adapters(model)
    found = LOSS_MAPPING.get(getattr(core, "loss_type", None))
    return found is ForCausalLMLoss and not getattr(core.config, "is_encoder_decoder", False)
