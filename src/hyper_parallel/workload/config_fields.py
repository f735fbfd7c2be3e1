"""Reads a Transformers config: the fields of the Shape that it describes (`Shape.of_config`).

For fields that a config leaves out, the defaults of its family's class apply: whether an MLP has a gate, whether the
head is tied, which layers have a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import hybrids
from hyper_parallel.workload.mixers import Latent, LayerMix

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
) | {"nemotron", "nemotron_h", "persimmon", "biogpt"}
"""Families whose MLPs have two matrix products; their default width is four times the hidden size."""

_BIASED_EXPERTS = frozenset({"gpt_oss"})
"""Families whose routed experts have biases, whatever their configs say."""
_TIED = frozenset(
    ("gpt2", "gpt_bigcode", "bloom", "mpt", "opt", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text")
)
"""Families that tie head and embedding by default."""

_WINDOWED = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Families in which every n-th layer has no window, if a config does not list these layers."""


def shape_fields(config: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return the arguments of the Shape that a config describes. Raises ConfigError as `Shape.of_config`."""
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # A vision-language model: its language model is planned.
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    family = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"the model {name!r} has an encoder and a decoder; give a decoder alone")
    layers = hybrids.find(config, *_LAYERS) or len(hybrids.kinds(config, 0)) or _need(config, name, *_LAYERS)
    hidden = _need(config, name, *_HIDDEN)
    mix = hybrids.layer_mix(config, name, layers, hidden)
    # Models of mixers alone have no heads: their attention is that of no layer.
    heads = _need(config, name, *_HEADS) if mix is None or mix.attending else 1
    latent = _latent(config, name)
    size = latent.plain + latent.rotary if latent else hybrids.find(config, *_HEAD_DIM)
    gated = family not in _WITHOUT_GATES
    experts = _experts(config, name, layers, mix)
    window, windowed = _windows(config, family, layers)
    tied = config.get("tie_word_embeddings")
    fields: dict[str, Any] = dict(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=(hybrids.find(config, *_KV_HEADS) or heads) if heads > 1 else 1,
        head_dim=size or hidden // heads,
        ffn=_features(config, name, family, hidden, gated, bool(experts), mix),
        gated=gated,
        vocabulary=_need(config, name, *_VOCABULARY),
        tied=family in _TIED if tied is None else bool(tied),
        latent=latent,
        window=window,
        windowed=windowed,
        positions=hybrids.find(config, *_POSITIONS),
        gate=hybrids.gate_columns(family, heads, size or hidden // heads),
        expert_hidden=hybrids.find(config, "moe_latent_size") if experts else 0,
        expert_bias=bool(experts) and family in _BIASED_EXPERTS,
        mix=mix,
        source=f"the config of {name}",
        **experts,
    )
    return fields if mix is None else {**fields, "vectors": _vectors(config, family, fields, mix)}


def _vectors(config: Mapping[str, Any], family: str, fields: Mapping[str, Any], mix: LayerMix) -> int:
    """Elements of the biases and norms of heads that configs of other mixers state, in all layers."""
    sparse = mix.feeding - fields.get("dense_layers", 0) if fields.get("experts") else 0
    attention = hybrids.attention_vectors(
        config, family, fields["heads"], fields["kv_heads"], fields["head_dim"]
    )
    dense = hybrids.mlp_vectors(config, family, fields["hidden"], fields["ffn"], fields["gated"])
    experts = hybrids.expert_vectors(config, family, fields["hidden"])
    return mix.attending * attention + (mix.feeding - sparse) * dense + sparse * experts


def _features(
    config: Mapping[str, Any],
    name: str,
    family: str,
    hidden: int,
    gated: bool,
    experts: bool,
    mix: LayerMix | None,
) -> int:
    """Features of an MLP without experts; 0 where no layer has one."""
    if mix is not None and not mix.feeding:
        return 0
    found = hybrids.find(config, *_FFN)
    if not experts and (shared := hybrids.find(config, "shared_intermediate_size")):
        # The MLP of a family that may have experts beside it.
        return shared
    if config.get("block_auto_adjust_ff_dim"):
        found = int(2 * found / 3 * (config.get("block_ffn_dim_multiplier") or 1.0))
        multiple = hybrids.find(config, "block_multiple_of") or 1
        found = -(-found // multiple) * multiple
    if family == "recurrent_gemma":
        # It writes the features of gate and product together.
        return found // 2
    if experts and mix is not None:
        return found or hybrids.find(config, "moe_intermediate_size")
    return found or (4 * hidden if not gated else _need(config, name, *_FFN))


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=hybrids.find(config, "q_lora_rank"),
        key_rank=_need(config, name, "kv_lora_rank"),
        plain=_need(config, name, "qk_nope_head_dim"),
        rotary=_need(config, name, "qk_rope_head_dim"),
        value=_need(config, name, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], name: str, layers: int, mix: LayerMix | None) -> dict[str, int]:
    """The fields of a Shape that describe experts."""
    experts = hybrids.find(config, *_EXPERTS)
    kinds = hybrids.kinds(config, layers)
    blocks = mix is not None and mix.feeding < layers
    if experts < 2 or (blocks and not any(kind in ("moe", "E") for kind in kinds)):
        return {}
    features = hybrids.find(config, "moe_intermediate_size", "expert_intermediate_size")
    features = features or _need(config, name, *_FFN)
    shared = hybrids.find(
        config,
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    return {
        "experts": experts,
        "chosen": _need(config, name, *_CHOSEN),
        "expert_ffn": features,
        "shared_ffn": shared or features * hybrids.find(config, "n_shared_experts", "num_shared_experts"),
        "dense_layers": sum(kind in ("mlp", "-") for kind in kinds) if blocks else _dense(config, layers),
        **_groups(config),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    """Groups of experts that a token's choice is limited to; one group limits nothing."""
    groups, chosen = hybrids.find(config, "n_group"), hybrids.find(config, "topk_group")
    return {"expert_groups": groups, "chosen_groups": chosen} if 0 < chosen < groups else {}


def _dense(config: Mapping[str, Any], layers: int) -> int:
    """The number of layers without experts: the first ones, or those that a list or a step excludes."""
    if types := config.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in types)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if config.get(key) is not None:
            return min(int(config[key]), layers)
    if period := config.get("expert_layer_period"):
        offset = config.get("expert_layer_offset", 0)
        return sum(layer % period != offset for layer in range(layers))
    step, without = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return sum(layer in without or (layer + 1) % step != 0 for layer in range(layers))


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, float]:
    """Tokens of a window, and the share of the layers that have it."""
    window = hybrids.find(config, "sliding_window", "attention_chunk_size", "attention_window_size")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0.0
    if types := config.get("layer_types"):
        attending = [
            kind for kind in types if kind in ("full_attention", "sliding_attention", "chunked_attention")
        ]
        share = sum(kind != "full_attention" for kind in attending) / max(1, len(attending))
    elif every := config.get("sliding_window_pattern") or _WINDOWED.get(family):
        share = 1 - layers // int(every) / layers
    elif config.get("use_sliding_window"):
        share = max(0, layers - int(config.get("max_window_layers") or 0)) / layers
    else:
        share = 1.0
    return (window, share) if share else (0, 0.0)


def _need(config: Mapping[str, Any], name: str, *keys: str) -> int:
    found = hybrids.find(config, *keys)
    if not found:
        raise ConfigError(
            f"the config of {name or 'the model'!r} has no {keys[0]}, which its shape needs; give it, or another name "
            "of it that Transformers uses"
        )
    return found
