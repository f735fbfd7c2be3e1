"""Small causal language models of families that differ in packing, in rotary factors and in the terms of their loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ASKS = {"output_router_logits": True}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt-oss": ("gpt_oss", {**_EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "hidden_dropout": 0.1}),
    "roberta": ("roberta", {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 600}),
    "mamba": ("mamba", {"state_size": 4, "expand": 2, "conv_kernel": 4}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
    "mixtral": ("mixtral", {**_EXPERTS, **_ASKS, "router_aux_loss_coef": 0.5}),
    "mixtral, silent": ("mixtral", {**_EXPERTS, "router_aux_loss_coef": 0.5}),
    "jetmoe": ("jetmoe", {**_EXPERTS, **_ASKS, "kv_channels": 8, "aux_loss_coef": 0.25}),
    "dbrx": (
        "dbrx",
        {
            **_ASKS,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_loss_weight": 0.125,
            },
        },
    ),
    "bamba": (
        "bamba",
        {
            "z_loss_coefficient": 0.1,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "attn_layer_indices": [1],
        },
    ),
    "doge": (
        "doge",
        {**_ASKS, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.5},
    ),
}


def small(family: str, **changes: Any) -> torch.nn.Module:
    """The model with values."""
    kind, fields = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**SIZES, **fields, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind in ("doge", "dbrx"):
        skip_unless_it_runs(model)
    return model


def skip_unless_it_runs(model: torch.nn.Module) -> None:
    """Skip the test where the installed release cannot run its own model: Doge's experts and DBRX's auxiliary loss, in
    Transformers 5.17."""
    rows = torch.zeros(1, 2, dtype=torch.long)
    try:
        model(rows, labels=rows)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this release of Transformers: {type(model).__name__} does not run: {error}")
