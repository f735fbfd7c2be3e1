"""The model families that the matrix proves, each as the fields of a small Transformers config.

131 tokens, 50 features: the axes divide none of the split sizes, except the experts' 28 features, since torch's grouped
matrix product on one device requires multiples of 16 bytes. Two key-value heads are fewer than four ranks. Windows are
shorter than the sequences, and soft caps low enough to have an effect.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.verify.step import EXPERT_COUNTS

Fields = dict[str, Any]

SHAPE: Fields = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

TOKENS: Fields = {"pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2}

_DEEPSEEK: Fields = {
    "model_type": "deepseek_v3",
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 28,
    "first_k_dense_replace": 1,
}

IMAGE_TOKEN = 130
"""The placeholder token of an image patch in a vision-language model's text."""

FAMILIES: dict[str, Fields] = {
    "llama": {"model_type": "llama", **SHAPE, "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SHAPE, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **SHAPE},
    "qwen3": {"model_type": "qwen3", **SHAPE, "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        **SHAPE,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.0,
        "attn_implementation": "eager",  # the only one of Transformers' own that caps the scores
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SHAPE,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3", **SHAPE, **TOKENS, "resid_pdrop": 0.1},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "attn_implementation": "eager",  # the only one of Transformers' own that has sinks
        **SHAPE,
        **TOKENS,
        "head_dim": 8,
        "intermediate_size": 28,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mixtral": {
        "model_type": "mixtral",
        **SHAPE,
        "intermediate_size": 28,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **SHAPE,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
    },
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-whole-query": {**_DEEPSEEK, "q_lora_rank": None},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 131,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_pdrop": 0.0,
    },
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 129,
        "vision_start_token_id": 128,
        "vision_end_token_id": 127,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **SHAPE,
            **TOKENS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 50,
            "num_heads": 4,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
        },
    },
}
"""Family to the fields of its config; `model_type` selects the config class, `attn_implementation` is not a config
field.
"""

WITH_EXPERTS = frozenset(
    name for name, fields in FAMILIES.items() if any(fields.get(key) for key in EXPERT_COUNTS)
)
"""The families with mixture-of-experts layers."""

WITH_IMAGES = frozenset({"qwen2.5-vl"})
"""The vision-language families; built by ``AutoModelForImageTextToText``."""
