"""Converts a Shape to a Transformers config.

A shape does not describe norms, biases or positions, so that the plainest family with its parts is chosen:
`deepseek_v3` for latent attention, `glm4_moe` for shared experts or dense layers among experts, `mixtral` for other
experts, `gpt_oss` where some of their layers have a window, `qwen3` where some layers without experts have one,
`mistral` where all have, the published config of a model with other token mixers, `gpt2` or `nemotron` for an MLP
without a gate, else `llama`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload.published import CONFIGS
from hyper_parallel.workload.shape import Shape

POSITIONS = 131072
"""Maximum positions for a shape that does not state them, so that no sequence is too long."""


def to_config(shape: Shape, sequence: int = 0) -> dict[str, Any]:
    """The config, with positions for at least `sequence` tokens.

    Raises ConfigError for a shape with other token mixers that is not a published model's.
    """
    positions = max(shape.positions or POSITIONS, sequence)
    if shape.mix is not None:
        if shape.name not in CONFIGS:
            raise ConfigError(
                f"the dimensions of {shape.title!r} do not say which of its layers mix tokens without "
                "attention; give its config.json"
            )
        return {**CONFIGS[shape.name][1], "max_position_embeddings": positions}
    if not shape.gated and not shape.experts and shape.kv_heads == shape.heads:
        return {
            "model_type": "gpt2",
            "vocab_size": shape.vocabulary,
            "n_embd": shape.hidden,
            "n_inner": shape.ffn,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_positions": positions,
            "tie_word_embeddings": shape.tied,
        }
    config: dict[str, Any] = {
        "model_type": "llama" if shape.gated else "nemotron",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": shape.tied,
    }
    if shape.latent is not None:
        return config | _latent_fields(shape)
    config["head_dim"] = shape.head_dim
    if shape.experts:
        return config | _expert_fields(shape)
    if shape.windowed:
        return config | _window_fields(shape)
    return config


def _latent_fields(shape: Shape) -> dict[str, Any]:
    assert shape.latent is not None
    latent = shape.latent
    return {
        "model_type": "deepseek_v3",
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_rank,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        **_routed_fields(shape),
        **_group_fields(shape),
    }


def _expert_fields(shape: Shape) -> dict[str, Any]:
    if shape.shared_ffn or shape.dense_layers:
        return {"model_type": "glm4_moe", **_routed_fields(shape), **_group_fields(shape)}
    some = 0 < shape.windowed < 1
    return {
        "model_type": "gpt_oss" if some else "mixtral",
        "intermediate_size": shape.expert_ffn,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "sliding_window": shape.window if shape.windowed else None,
        **({"layer_types": _layer_types(shape)} if some else {}),
    }


def _group_fields(shape: Shape) -> dict[str, Any]:
    return {"n_group": max(1, shape.expert_groups), "topk_group": max(1, shape.chosen_groups)}


def _routed_fields(shape: Shape) -> dict[str, Any]:
    if not shape.experts:
        return {"first_k_dense_replace": shape.layers}
    return {
        "moe_intermediate_size": shape.expert_ffn,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "n_shared_experts": max(1, round(shape.shared_ffn / shape.expert_ffn)) if shape.shared_ffn else 0,
        "first_k_dense_replace": shape.dense_layers,
    }


def _window_fields(shape: Shape) -> dict[str, Any]:
    if shape.windowed == 1:
        return {"model_type": "mistral", "sliding_window": shape.window}
    return {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": shape.window,
        "layer_types": _layer_types(shape),
    }


def _layer_types(shape: Shape) -> list[str]:
    """The windowed layers: the shape's share of the layers, distributed evenly."""
    whole = [int(layer * shape.windowed + 1e-9) for layer in range(shape.layers + 1)]
    return ["sliding_attention" if after > before else "full_attention" for before, after in pairwise(whole)]
