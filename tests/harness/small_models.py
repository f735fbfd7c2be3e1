"""The causal language models of the installed Transformers, each at test size with the ratios of its default config.

A default config has the sizes of a published model. The name of a key tells what it counts, across families: layers,
heads, features of a head, other widths, experts, tokens, positions. Heads are reduced to 8 and the hidden size to 64;
key-value heads and all other widths keep their ratio to them, so that divisibility is preserved. Among layers of
different kinds (attention with a window, with experts, recurrent …) the first of each kind stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.equivalence import build_model

Fields = dict[str, Any]

HIDDEN, HEADS, HEAD, LAYERS, VOCABULARY, POSITIONS, WINDOW, EXPERTS = 64, 8, 8, 2, 136, 64, 8, 8

# What a key counts, by its name. The first that matches counts; the order matters.
_LAYERS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_blocks|num_layers_per_stack"
)
_STATE_HEADS = re.compile(r"mamba_n_heads|mamba_num_heads")
_INDEX_HEADS = re.compile(r"index_n_heads")
"""Of sparse attention (DeepSeek's). A key whose score is 0 in every one of them ties with others like it, and which of
them are chosen follows from the length of the row: of 4 heads that is every sixteenth key, of 16 none."""
_KV = re.compile(r"\w*(key_value_heads|kv_heads)")
_HEADS = re.compile(r"\w*(attention_heads|num_heads|n_heads?|num_query_groups)")
_HEAD = re.compile(r"\w*(head_dim|d_head|dim_head|kv_channels|head_size|rotary_dim)")
_VOCABULARY = re.compile(r"\w*vocab_size\w*")
_TOKEN = re.compile(r"\w*token_ids?|\w+_index")
_POSITIONS = re.compile(
    r"\w*(max_position|n_positions|n_ctx|max_seq_len|context_length|max_target_pos|max_source_pos)\w*"
)
_WINDOW = re.compile(
    r"(?!max_window|num_)\w*(window|attention_chunk_size|local_attention|index_topk)(_size|_len)?"
)
_CHUNK = re.compile(r"\w*(chunk_size|chunk_length)")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_k")
_GROUPS = re.compile(r"n_group|num_expert_group")
_CHOSEN_GROUPS = re.compile(r"topk_group")
_DENSE = re.compile(r"first_k_dense_replace|num_dense_layers")
_WIDTH = re.compile(
    r"\w*(hidden|intermediate|ffn|feed_forward|dff|dim|d_model|n_embd|inner|width|rank|embedding|emb|state_size"
    r"|d_state|dim_ff|d_ssm)\w*"
)
_RATE = re.compile(r"\w*(drop|jitter)\w*")
_DECAY = re.compile(r".*\.(slope_rate|(query|key|diagonal)_decay)")
"""Buffers of linear attention that follow from its number of heads; with noise on its zeros, MiniMax is not causal."""
_AUXILIARY = re.compile(r"\w*loss_(coef|coefficient|weight)")

_HEADS_OF_MODEL = (
    *("num_attention_heads", "n_heads", "n_head", "decoder_attention_heads", "num_decoder_attention_heads"),
    *("attention_heads", "num_heads"),
)
_LAYERS_OF_MODEL = (
    *("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers", "num_decoder_layers"),
    "num_blocks",
)

_HYBRID = {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]}

EXCEPTIONS: Mapping[str, Fields] = {
    # Sizes that must multiply to others of the config.
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 16},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 16, "num_hidden_layers": 4, **_HYBRID},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 16, "kv_channels": 8, "mamba_headdim": 16},
    "longcat_flash": {"qk_head_dim": 16},
    # 4 · 8 positions, which every row of a training has; hashes by one seed.
    "reformer": {
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 48],
        "num_buckets": 4,
        "hash_seed": 0,
    },
    # Layers named one by one elsewhere in the config.
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 128,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    },
    # Kinds of layers that the default's first ones are not.
    "bamba": {"mamba_d_head": 8, "attn_layer_indices": [1]},
    "doge": {"is_moe": True},
    "flint": {"mlp_only_layers": [0]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    # Values that a default leaves out and the model cannot do without.
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 8},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
    },
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 112,
            "moe_num_experts": EXPERTS,
            "moe_top_k": 2,
        },
    },
}
"""Exceptions by `model_type` that a key's name does not show, each with the reason."""


def causal_families() -> list[str]:
    """The families of causal language models that read text alone. A family that is several models in one (a vision
    tower and a language model) stands here by its language model, which is a family of its own."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parts = {"attn_config", "ffn_config"}  # sections of one model, not models
    drafting = "_assistant"  # a drafting head, which reads another model's keys and values
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if set(CONFIG_MAPPING[name].sub_configs) <= parts and not name.endswith(drafting)
    ]


def small_fields(family: str, *, auxiliary: bool = False, **more: Any) -> Fields:
    """`shrunken` of a family's default config, with its auxiliary losses if they are asked for, and `more`."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    fields = {**shrunken(config), "model_type": family}
    return {**fields, **(_auxiliary_losses(config.to_dict(), fields) if auxiliary else {}), **more}


def noisy_model(fields: Fields, spread: float = 0.1) -> nn.Module:
    """A float32 model with noise on each parameter and learned buffer, so that none is a neutral 0 or 1: what is left
    out, or taken twice, shows."""
    model = build_model(fields, "cpu").float()
    learned = {
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not _DECAY.fullmatch(name)
    }
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in learned:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * spread)
    return model


def _auxiliary_losses(default: Fields, small: Fields) -> Fields:
    """What switches a config's auxiliary losses on, with coefficients that show, also in its sections."""
    on: Fields = {key: 0.5 for key in default if _AUXILIARY.fullmatch(str(key))}
    if "output_router_logits" in default:
        on["output_router_logits"] = True
    for key, section in default.items():
        inner = _auxiliary_losses(section, {}) if isinstance(section, dict) else {}
        if inner:
            on[key] = {**(small.get(key) or section), **inner}
    return on


def shrunken(config: Any) -> Fields:
    """The fields that make a Transformers config small: `model_type` and what differs from its class's default.

    Dropout rates are 0, and `is_decoder` is set if the class also has encoders.
    """
    fields = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "transformers_version")}
    hidden = _first(fields, "hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim") or HIDDEN
    heads = _first(fields, *_HEADS_OF_MODEL) or HEADS
    layers, kept = _kept_layers(fields)
    made: Fields = {"vocab_size": VOCABULARY}
    for key, value in fields.items():
        small = _small(key, value, hidden, heads, layers, kept)
        if small is not None and small != value:
            made[key] = small
    return {"model_type": config.model_type, **made, **EXCEPTIONS.get(config.model_type, {})}


def _small(key: str, value: Any, hidden: int, heads: int, layers: int, kept: list[int]) -> Any:
    """The value of a small config; None to leave the key as it is."""
    if _is_by_layer(value, layers):
        chosen = [value[at] for at in kept]
        return [_small(key, one, hidden, heads, layers, kept) or one for one in chosen]
    if isinstance(value, float) and _RATE.fullmatch(key):
        return 0.0
    if value is None:
        return {"head_dim": HEAD, "num_key_value_heads": HEADS}.get(key)
    if isinstance(value, bool):
        return True if key == "is_decoder" else None
    if not isinstance(value, int) or value <= 0:
        return None
    known = {
        _LAYERS: len(kept),
        _STATE_HEADS: 2 * HIDDEN // HEAD,
        _INDEX_HEADS: min(value, 16),
        _KV: max(1, round(HEADS * value / heads)),
        _HEADS: max(1, round(HEADS * value / heads)),
        _HEAD: min(value, HEAD),
        _VOCABULARY: min(value, VOCABULARY),
        _TOKEN: value if value < 8 else 3,
        _POSITIONS: POSITIONS,
        _WINDOW: min(value, WINDOW),
        _CHUNK: min(value, WINDOW),
        _EXPERTS: min(value, EXPERTS),
        _CHOSEN: min(value, 2),
        _GROUPS: min(value, 2),
        _CHOSEN_GROUPS: 1,
        _DENSE: min(value, 1),
        _WIDTH: max(8, 4 * round(value * HIDDEN / hidden / 4)) if value >= 32 else value,
    }
    return next((small for pattern, small in known.items() if pattern.fullmatch(key)), None)


def _is_by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers and layers > LAYERS


def _kept_layers(fields: Fields) -> tuple[int, list[int]]:
    """The number of layers, and which stay: the first of each kind, four at most and two at least."""
    layers = _first(fields, *_LAYERS_OF_MODEL) or LAYERS
    by_layer = [value for value in fields.values() if _is_by_layer(value, layers)]
    kinds = [str([value[at] for value in by_layer]) for at in range(layers)]
    kept = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())[:4]
    kept += [at for at in range(layers) if at not in kept][: max(LAYERS - len(kept), 0)]
    return layers, sorted(kept)


def _first(fields: Fields, *names: str) -> int | None:
    return next((v for name in names if isinstance(v := fields.get(name), int) and v > 0), None)
