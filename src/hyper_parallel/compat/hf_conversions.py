"""Conversions by Transformers when it loads a folder: whether weights are only renamed and experts joined."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

_JOINS = frozenset({"MergeModulelist", "Concatenate"})


def beyond_names(model: Any, stored: Collection[str]) -> str | None:
    """What `from_pretrained` would do with the stored tensors of a model, beside renaming them and joining experts;
    None if nothing."""
    half = model.dtype in (torch.float16, torch.bfloat16)
    if half and (
        getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    ):
        return "some weights stay in float32"
    if getattr(model.config, "quantization_config", None) is not None:
        return "the weights are quantized"
    ties = getattr(model, "_tied_weights_keys", None) or {}
    if isinstance(ties, dict) and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        both = next((name for name, other in ties.items() if name in stored and other in stored), None)
        if both is not None:
            return f"{both} is stored, and shared with another weight"
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    for one in get_model_conversion_mapping(model):
        operations = {type(operation).__name__ for operation in getattr(one, "operations", None) or ()}
        if operations <= _JOINS:
            continue
        patterns = [re.compile(_regex(str(pattern))) for pattern in one.source_patterns]
        if any(pattern.search(name) for pattern in patterns for name in stored):
            return f"weights are converted ({', '.join(sorted(operations - _JOINS))})"
    return None


def _regex(pattern: str) -> str:
    """Transformers' pattern, in which `*` stands for the number of an expert."""
    return pattern.replace(".*.", r"\..*\.") if ".*." in pattern else pattern
