"""Converts a Transformers config to a Shape.

For fields that a config leaves out, the defaults of its family's class apply: whether an MLP has a gate, whether the
head is tied, which layers have a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload.shape import Latent, Shape

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels")
_FFN = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

_WITHOUT_GATES = frozenset(
    (
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "bloom",
        "opt",
        "mpt",
        "phi",
        "falcon",
        "starcoder2",
    )
) | {"nemotron", "persimmon", "biogpt"}
"""Families whose MLPs have two matrix products; their default width is four times the hidden size."""

_TIED = frozenset(
    ("gpt2", "gpt_bigcode", "bloom", "mpt", "opt", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text")
)
"""Families that tie head and embedding by default."""

_WINDOWED = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Families in which every n-th layer has no window, if a config does not list these layers."""

_OTHER_LAYERS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_n_heads",
    "state_size",
    "linear_num_key_heads",
    "ssm_state_size",
)
"""Keys of configs with layers that are neither attention nor MLPs."""


def of_config(config: Mapping[str, Any], name: str = "") -> Shape:
    """The shape that a config describes; see `Shape.of_config`."""
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # A vision-language model: its language model is planned.
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    family = str(config.get("model_type", ""))
    _refuse(config, name)
    layers, hidden, heads = (_need(config, name, *keys) for keys in (_LAYERS, _HIDDEN, _HEADS))
    latent = _latent(config, name)
    size = latent.plain + latent.rotary if latent else _find(config, *_HEAD_DIM)
    gated = family not in _WITHOUT_GATES
    experts = _experts(config, name, layers)
    window, windowed = _windows(config, family, layers)
    tied = config.get("tie_word_embeddings")
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_find(config, *_KV_HEADS) or heads,
        head_dim=size or hidden // heads,
        ffn=(0 if gated else _find(config, *_FFN) or 4 * hidden) or _need(config, name, *_FFN),
        gated=gated,
        vocabulary=_need(config, name, *_VOCABULARY),
        tied=family in _TIED if tied is None else bool(tied),
        latent=latent,
        window=window,
        windowed=windowed,
        positions=_find(config, *_POSITIONS),
        source=f"the config of {name}",
        **experts,
    )


def _refuse(config: Mapping[str, Any], name: str) -> None:
    types = set(config.get("layer_types") or ())
    strange = sorted(types - {"full_attention", "sliding_attention", "chunked_attention"})
    found = strange or [key for key in _OTHER_LAYERS if config.get(key)]
    if found:
        raise ConfigError(
            f"the model {name!r} has layers that are neither attention nor MLPs ({', '.join(found)}), which no formula "
            "here describes; give a model of attention and MLPs"
        )
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"the model {name!r} has an encoder and a decoder; give a decoder alone")


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=_find(config, "q_lora_rank"),
        key_rank=_need(config, name, "kv_lora_rank"),
        plain=_need(config, name, "qk_nope_head_dim"),
        rotary=_need(config, name, "qk_rope_head_dim"),
        value=_need(config, name, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], name: str, layers: int) -> dict[str, int]:
    """The fields of a Shape that describe experts."""
    experts = _find(config, *_EXPERTS)
    if experts < 2:
        return {}
    features = _find(config, "moe_intermediate_size", "expert_intermediate_size")
    features = features or _need(config, name, *_FFN)
    shared = _find(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    return {
        "experts": experts,
        "chosen": _need(config, name, *_CHOSEN),
        "expert_ffn": features,
        "shared_ffn": shared or features * _find(config, "n_shared_experts", "num_shared_experts"),
        "dense_layers": _dense(config, layers),
        **_groups(config),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    """Groups of experts that a token's choice is limited to; one group limits nothing."""
    groups, chosen = _find(config, "n_group"), _find(config, "topk_group")
    return {"expert_groups": groups, "chosen_groups": chosen} if 0 < chosen < groups else {}


def _dense(config: Mapping[str, Any], layers: int) -> int:
    """The number of layers without experts: the first ones, or those that a list or a step excludes."""
    if types := config.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in types)
    if config.get("first_k_dense_replace") is not None:
        return min(int(config["first_k_dense_replace"]), layers)
    step, without = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return sum(layer in without or (layer + 1) % step != 0 for layer in range(layers))


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, float]:
    """Tokens of a window, and the share of the layers that have it."""
    window = _find(config, "sliding_window", "attention_chunk_size")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0.0
    if types := config.get("layer_types"):
        share = sum(kind != "full_attention" for kind in types) / layers
    elif every := config.get("sliding_window_pattern") or _WINDOWED.get(family):
        share = 1 - layers // int(every) / layers
    elif config.get("use_sliding_window"):
        share = max(0, layers - int(config.get("max_window_layers") or 0)) / layers
    else:
        share = 1.0
    return (window, share) if share else (0, 0.0)


def _find(config: Mapping[str, Any], *keys: str) -> int:
    """The value of the first key that the config has; 0 if it has none."""
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def _need(config: Mapping[str, Any], name: str, *keys: str) -> int:
    found = _find(config, *keys)
    if not found:
        raise ConfigError(
            f"the config of {name or 'the model'!r} has no {keys[0]}, which its shape needs; give it, or another name "
            "of it that Transformers uses"
        )
    return found
