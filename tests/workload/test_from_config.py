"""Shapes of Transformers configs: their parameters are those of the model that Transformers builds of the config."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.families import FAMILIES, SHAPE, TOKENS
from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Shape
from hyper_parallel.workload.published import shape

MORE: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **SHAPE, "head_dim": 8},
    "gpt-neox": {"model_type": "gpt_neox", **SHAPE, **TOKENS, "num_key_value_heads": 4},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **SHAPE,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        **SHAPE,
        **TOKENS,
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "olmoe": {"model_type": "olmoe", **SHAPE, **TOKENS, "num_experts": 8, "num_experts_per_tok": 2},
    "smollm3": {"model_type": "smollm3", **SHAPE, **TOKENS},
    "starcoder2": {"model_type": "starcoder2", **SHAPE, **TOKENS},
}
WITHOUT_VISION = {name: fields for name, fields in FAMILIES.items() if "vision_config" not in fields}


def matrices(fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The config as its JSON has it, and the elements of the model's matrices, positions left out."""
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.endswith(("bias", "wpe.weight", "shared_expert_gate.weight"))
    }
    return json.loads(config.to_json_string(use_diff=False)), sum(counted.values())


@pytest.mark.parametrize("name", [*WITHOUT_VISION, *MORE])
def test_parameters_are_those_of_the_model_that_is_built(name: str) -> None:
    config, counted = matrices({**WITHOUT_VISION, **MORE}[name])
    found = Shape.of_config(config)
    norms = (2 * found.layers + 1) * found.hidden
    assert found.parameters - norms == counted


def test_the_language_model_of_one_that_sees_is_what_is_planned() -> None:
    found = Shape.of_config(AutoConfig.for_model(**FAMILIES["qwen2.5-vl"]).to_dict())
    assert (found.layers, found.hidden, found.kv_heads, found.vocabulary) == (2, 32, 2, 131)


def test_windows_are_those_of_the_layers_that_have_them() -> None:
    found = {
        name: Shape.of_config(matrices(FAMILIES[name])[0])
        for name in ("mistral", "gemma2", "qwen2", "gpt-oss")
    }
    assert [(s.window, s.windowed) for s in found.values()] == [(8, 1), (8, 0.5), (0, 0), (8, 0.5)]


def test_experts_with_biases_are_those_of_gpt_oss() -> None:
    found = {
        name: Shape.of_config(matrices(FAMILIES[name])[0]).expert_bias for name in ("gpt-oss", "qwen3-moe")
    }
    assert found == {"gpt-oss": True, "qwen3-moe": False}


def test_latent_attention_and_experts() -> None:
    found = Shape.of_config(FAMILIES["deepseek-v3"], "mine")
    assert found.latent is not None and found.name == "mine"
    assert (found.latent.query_rank, found.latent.key_rank, found.head_dim) == (12, 16, 12)
    assert (found.experts, found.chosen, found.shared_ffn, found.dense_layers) == (8, 2, 28, 1)


def test_files_of_published_models_have_the_published_shapes() -> None:
    """As their config.json reads, with what the family's class adds left out."""
    gemma = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
    }
    chatglm = {
        "model_type": "chatglm",
        "num_layers": 28,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "multi_query_group_num": 2,
        "kv_channels": 128,
        "ffn_hidden_size": 13696,
        "padded_vocab_size": 65024,
        "seq_length": 32768,
        "tie_word_embeddings": False,
    }
    gpt = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    for config, name in ((gemma, "gemma-3-1b"), (chatglm, "chatglm-3-6b"), (gpt, "gpt-2")):
        stated = shape(name)
        found = Shape.of_config(config, name)
        assert found == Shape(**{**vars(stated), "source": found.source})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "no num_hidden_layers"),
        ({"model_type": "llama", **SHAPE, "intermediate_size": None}, "no intermediate_size"),
        ({"model_type": "t5", **SHAPE, "is_encoder_decoder": True}, "an encoder and a decoder"),
        (
            {"model_type": "x", **SHAPE, "layer_types": ["linear_attention", "full_attention"]},
            "sizes its config does not give",
        ),
        ({"model_type": "x", **SHAPE, "layer_types": ["hybrid", "full_attention"]}, "hybrid"),
        ({"model_type": "x", **SHAPE, "linear_num_value_heads": 4}, "which layers these are"),
        ({"model_type": "bamba", **SHAPE, "mamba_d_state": 16}, "neither mamba_n_heads"),
        ({"model_type": "zamba2", **SHAPE, "num_mem_blocks": 1}, "share their weights"),
        ({"model_type": "rwkv", **SHAPE}, "in a way that no formula here describes"),
    ],
)
def test_what_is_no_decoder_of_attention_and_mlps_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Shape.of_config(config)
