"""Adapters of a run file (LoRA, arXiv 2106.09685): peft puts them into a model on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.config.model import AdapterConfig
from hyper_parallel.errors import ConfigError


def with_adapters(model: nn.Module, declared: AdapterConfig) -> nn.Module:
    """The model with adapters, its other parameters frozen, on the meta device.

    Raises ConfigError where peft is not installed, or a name fits no linear layer.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            "model.adapter needs the library peft; run: pip install hyper-parallel[lora]"
        ) from None
    targets = declared.targets if isinstance(declared.targets, str) else list(declared.targets)
    settings = LoraConfig(
        r=declared.rank,
        lora_alpha=declared.alpha or 2 * declared.rank,
        lora_dropout=declared.dropout,
        target_modules=targets,
        use_rslora=declared.rslora,
        use_dora=declared.dora,
    )
    try:
        with torch.device("meta"):
            found = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"model.adapter: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(found, nn.Module)
    return found
