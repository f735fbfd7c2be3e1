"""Shapes of models with other token mixers: parameters are those of the model that Transformers builds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Shape, flops_of_model

CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
CONFIGS: dict[str, dict[str, Any]] = {
    "jamba": {"num_hidden_layers": 8},
    "jamba, biases": {"model_type": "jamba", "num_hidden_layers": 8, "mamba_proj_bias": True},
    "bamba": {"attn_layer_indices": [3, 9]},
    "nemotron_h": {},
    "nemotron_h, all kinds and latents": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "moe"],
        "moe_latent_size": 1024,
    },
    "nemotron_h, no experts": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "falcon_h1": {},
    "falcon_h1, norms": {"model_type": "falcon_h1", "mamba_rms_norm": True},
    "granitemoehybrid": {"num_hidden_layers": 4},
    "granitemoehybrid, no experts": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        "num_hidden_layers": 8,
    },
    "lfm2": {"layer_types": CONVOLUTIONS, "num_hidden_layers": 4},
    "lfm2, biases": {
        "model_type": "lfm2",
        "layer_types": CONVOLUTIONS,
        "num_hidden_layers": 4,
        "conv_bias": True,
    },
    "lfm2_moe": {"layer_types": CONVOLUTIONS * 4, "num_hidden_layers": 16},
    "qwen3_next": {"num_hidden_layers": 8},
    "qwen3_5_text": {"num_hidden_layers": 8},
    "qwen3_5_moe_text": {"num_hidden_layers": 8},
    "mamba": {},
    "mamba2": {},
    "mamba2, other sizes": {"model_type": "mamba2", "num_heads": 64, "head_dim": 32, "hidden_size": 1024},
    "falcon_mamba": {},
    "minimax": {"num_hidden_layers": 4},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "recurrent_gemma": {},
    "olmo_hybrid": {},
}


def built(fields: dict[str, Any], name: str) -> tuple[dict[str, Any], int]:
    """The config as its JSON has it, and the elements of the model that Transformers builds of it."""
    family = str(fields.get("model_type", name))
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no {family}")
    config = AutoConfig.for_model(family, **{key: fields[key] for key in fields if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plain = json.loads(config.to_json_string(use_diff=False))
    return plain, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_that_is_built(name: str) -> None:
    config, counted = built(CONFIGS[name], name)
    assert Shape.of_config(config).parameters == counted


@pytest.mark.parametrize(
    ("family", "fields", "mix"),
    [
        (
            "nemotron_h",
            {"hybrid_override_pattern": "MEM*-", "ssm_state_size": 16, "mamba_num_heads": 4},
            (1, 2, 2),
        ),
        ("bamba", {"attn_layer_indices": [1], "mamba_d_state": 16, "mamba_n_heads": 4}, (1, 4, 5)),
        (
            "jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 4},
            (2, 3, 5),
        ),
        ("lfm2", {"full_attn_idxs": [0, 4], "conv_L_cache": 3}, (2, 3, 5)),
        ("minimax", {"attn_type_list": [0, 0, 0, 0, 1], "block_size": 64}, (1, 4, 5)),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [4], "num_heads": 4, "head_dim": 8}},
            (1, 4, 5),
        ),
        (
            "qwen3_next",
            {
                "full_attention_interval": 4,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            (1, 4, 5),
        ),
    ],
)
def test_files_name_the_layers_in_other_ways(
    family: str, fields: dict[str, Any], mix: tuple[int, int, int]
) -> None:
    """As published config.json files have them, without what the family's class derives."""
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    some = experts if family == "nemotron_h" else {}
    found = Shape.of_config({"model_type": family, "vocab_size": 100, **sizes, **some, **fields})
    assert (found.attention_layers, found.mixer_layers, found.mlp_layers) == mix
    assert (found.expert_layers, found.dense_layers) == ((1, 1) if some else (0, 0))


def test_the_advice_for_sizes_that_a_config_lacks_mends_it() -> None:
    config = {
        "model_type": "bamba",
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "mamba_d_state": 16,
    }
    with pytest.raises(ConfigError, match="give one of them") as refused:
        Shape.of_config(config)
    assert "mamba_n_heads" in str(refused.value)
    assert Shape.of_config({**config, "mamba_n_heads": 8}).mixer_layers == 2


@pytest.mark.parametrize(
    ("family", "fields", "attending"),
    [
        ("nemotron_h", {}, 1),
        ("bamba", {"attn_layer_indices": [3, 9]}, 2),
        ("lfm2", {"layer_types": CONVOLUTIONS, "num_hidden_layers": 4}, 1),
        ("falcon_h1", {"num_hidden_layers": 3}, 3),
        ("mamba2", {"num_hidden_layers": 2}, 0),
        ("llama", {"num_hidden_layers": 2}, 2),
    ],
)
def test_flops_count_attention_where_layers_have_it(
    family: str, fields: dict[str, Any], attending: int
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    assert len(flops_of_model(model).windows) == attending
