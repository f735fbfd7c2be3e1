"""Small models of families whose folders have other names or shapes than the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from harness.small_models import shrunken

FAMILIES = ("gpt_neox", "granitemoe", "ernie4_5_moe", "inkling2_text")
"""Renamed; experts joined; a router's learned buffer renamed; weights that are taken apart in another order."""


def noisy(family: str, **fields: Any) -> Any:
    """The family's model in float32, with noise on each weight and learned buffer, so that none is a neutral 0 or 1."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no {family}")
    default = AutoConfig.for_model(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**shrunken(default), "model_type": family, **fields}), dtype=torch.float32
    )
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()


def blank(folder: Path, **fields: Any) -> Any:
    """The folder's model on the meta device."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, **fields)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(5, 25).unsqueeze(0), use_cache=False).logits
    return found


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
