"""Layer mixes of Transformers configs: which layers have attention, another token mixer, an MLP or experts.

Families name the same things differently: a list of kinds (`layer_types`, `layers_block_type`, `block_types`), a string
of letters (`hybrid_override_pattern`), indices (`attn_layer_indices`, `full_attn_idxs`), or a period. `layer_mix` reads
all of them; sizes of the mixer come from the fields that its kind has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload.mixers import LayerMix, Mixer

Config = Mapping[str, Any]

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention", "*"}
_MIXER = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "M"}
_MLP, _EXPERTS = {"mlp", "-"}, {"moe", "E"}
WITHOUT_ATTENTION = _MIXER | _MLP | _EXPERTS
"""Kinds of layers without softmax attention."""
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")

ALONE = frozenset(("mamba", "mamba2", "falcon_mamba"))
"""Families whose layers are mixers and nothing else."""
BOTH = frozenset(("falcon_h1",))
"""Families whose layers have attention and a mixer side by side."""
_GATED_ATTENTION = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"))
"""Families with a gate for each feature of attention's result, and of one column on their shared experts."""
_NORMED_HEADS = _GATED_ATTENTION | {"lfm2", "lfm2_moe"}
"""Families that normalise each head of queries and of keys."""
_NORMED_QUERIES = frozenset(("olmo_hybrid",))
"""Families that normalise all queries and all keys together."""
_GATED_HEADS = frozenset(("bailing_hybrid",))
"""Families with a gate for each head of attention's result, and full-rank gates of their delta rule."""
UNDESCRIBED = frozenset(("rwkv", "xlstm"))
"""Families whose layers are mixers of a kind that no formula here describes."""
_SHARED_WEIGHTS = ("num_mem_blocks", "hybrid_layer_ids")


def kinds(config: Config, layers: int) -> list[str]:
    """The kind of each layer, as the config names it; empty where it names nothing."""
    for key in _LISTS:
        if config.get(key):
            return list(config[key])
    if pattern := config.get("block_types"):
        return [pattern[layer % len(pattern)] for layer in range(layers)]
    full = _full_attention(config, layers)
    if full is None:
        return []
    return ["full_attention" if layer in full else "linear_attention" for layer in range(layers)]


def _full_attention(config: Config, layers: int) -> set[int] | None:
    """Layers with softmax attention, where a config gives their places; None where it does not."""
    family = config.get("model_type")
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if key in config:
            return set(config[key] or ())
    if (flags := config.get("attn_type_list")) is not None:
        return {layer for layer, flag in enumerate(flags) if flag}
    if isinstance(places := config.get("linear_attn_config"), Mapping):
        return {int(layer) - 1 for layer in places["full_attn_layers"]}
    if period := config.get("attn_layer_period"):
        return {layer for layer in range(layers) if layer % period == config.get("attn_layer_offset", 0)}
    every = config.get("full_attention_interval") or config.get("layer_group_size")
    if every:
        return {layer for layer in range(layers) if (layer + 1) % every == 0}
    if family == "bamba":
        return set()
    return None


def layer_mix(config: Config, name: str, layers: int, hidden: int) -> LayerMix | None:
    """The mix of a config's layers; None where all have attention and an MLP.

    Raises ConfigError, in one line, for layers that no formula describes, and for layers that share weights.
    """
    family = str(config.get("model_type", ""))
    found = kinds(config, layers)
    if family in UNDESCRIBED:
        raise ConfigError(
            f"the model {name!r} mixes tokens in a way that no formula here describes ({family}); give a model of "
            "attention, Mamba, delta rules, linear attention or short convolutions"
        )
    if any(config.get(key) for key in _SHARED_WEIGHTS):
        raise ConfigError(
            f"the model {name!r} has layers that share their weights ({_SHARED_WEIGHTS[0]}), which no formula here "
            "describes; give a model whose layers have their own"
        )
    strange = sorted(set(found) - ATTENTION - _MIXER - _MLP - _EXPERTS)
    if strange:
        raise ConfigError(
            f"the model {name!r} has layers of a kind that no formula here describes ({', '.join(strange)}); give a "
            "model of attention, MLPs, Mamba, delta rules, linear attention or short convolutions"
        )
    one = mixer(config, family, hidden)
    if family in ALONE:
        return LayerMix(mixer=one, mixing=layers, attending=0, feeding=0, norms=layers)
    if family in BOTH:
        return LayerMix(mixer=one, mixing=layers, attending=layers, feeding=layers, norms=2 * layers)
    mixing = sum(kind in _MIXER for kind in found)
    blocks = sum(kind in _MLP | _EXPERTS for kind in found)
    if not mixing and not blocks and one is None:
        return None
    if mixing and one is None:
        raise ConfigError(
            f"the model {name!r} has {mixing} layers without attention whose sizes its config does not give (for "
            "example mamba_n_heads, linear_num_value_heads or conv_L_cache); give them"
        )
    if not mixing and not blocks:
        # The family has such layers, and this config none: sizes without a layer.
        return None if found else _unplaced(name)
    attending = sum(kind in ATTENTION for kind in found)
    feeding = blocks or layers
    norms = layers if blocks else 2 * layers
    return LayerMix(mixer=one, mixing=mixing, attending=attending, feeding=feeding, norms=norms)


def _unplaced(name: str) -> LayerMix:
    raise ConfigError(
        f"the config of {name!r} has sizes of layers that are not attention, and does not say which layers these are; "
        f"give {' or '.join(_LISTS)}"
    )


def mixer(config: Config, family: str, hidden: int) -> Mixer | None:
    """The token mixer whose sizes a config has; None without one."""
    if find(config, "mamba_d_state", "ssm_state_size", "state_size"):
        return _mamba(config, family, hidden)
    if find(config, "linear_num_value_heads"):
        return _gated_delta(config)
    if find(config, "linear_num_heads") or config.get("linear_attn_config"):
        return _kimi_delta(config, family)
    if find(config, "conv_L_cache"):
        kernel, bias = find(config, "conv_L_cache"), bool(config.get("conv_bias"))
        return Mixer(
            kind="convolution",
            inputs=3 * hidden,
            inner=hidden,
            channels=hidden,
            kernel=kernel,
            vectors=5 * hidden * bias,
        )
    if width := find(config, "lru_width"):
        heads = find(config, "num_attention_heads")
        return Mixer(
            kind="recurrent_unit",
            inputs=2 * width,
            inner=width,
            others=2 * width * (width // heads),
            channels=width,
            kernel=find(config, "conv1d_width"),
            heads=heads,
            vectors=6 * width + hidden,
        )
    if family.startswith("minimax") and (block := find(config, "block_size")):
        heads = find(config, "num_attention_heads")
        size = find(config, "head_dim") or hidden // heads
        wide = heads * size
        return Mixer(
            kind="linear",
            inputs=4 * wide,
            inner=wide,
            heads=heads,
            groups=heads,
            key=size,
            value=size,
            chunk=block,
            vectors=wide,
        )
    return None


def _mamba(config: Config, family: str, hidden: int) -> Mixer:
    state = find(config, "mamba_d_state", "ssm_state_size", "state_size")
    heads = find(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    expand = config.get("mamba_expand") or config.get("expand") or 2
    kernel = find(config, "mamba_d_conv", "conv_kernel") or 4
    bias = config.get("mamba_conv_bias", config.get("use_conv_bias", True))
    projections = config.get("mamba_proj_bias", config.get("use_bias", False))
    rank = config.get("mamba_dt_rank") or config.get("time_step_rank")
    if not heads and not rank:
        raise ConfigError(
            f"the config of {family!r} has a state of {state} and neither mamba_n_heads, as Mamba-2 has, nor "
            "mamba_dt_rank, as Mamba has; give one of them"
        )
    if not heads:
        rank = math.ceil(hidden / 16) if rank == "auto" else int(rank or 0)
        inner = int(expand * hidden)
        one = Mixer(
            kind="mamba",
            inputs=2 * inner,
            inner=inner,
            others=inner * (rank + 2 * state) + rank * inner,
            channels=inner,
            kernel=kernel,
            heads=inner,
            key=state,
            value=1,
            vectors=inner * (state + 2 + bool(bias)) + (rank + 2 * state) * (family == "jamba"),
        )
        return _biased(one, hidden, bool(projections))
    size = find(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    size = size or (find(config, "head_dim") if family == "mamba2" else 0) or int(expand * hidden) // heads
    groups = find(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    inner = heads * size
    channels = inner + 2 * groups * state
    normed = config.get("mamba_rms_norm", True)
    one = Mixer(
        kind="mamba2",
        inputs=inner + channels + heads,
        inner=inner,
        channels=channels,
        kernel=kernel,
        heads=heads,
        key=state,
        value=size,
        groups=groups,
        chunk=find(config, "mamba_chunk_size", "chunk_size") or 256,
        vectors=3 * heads + inner * bool(normed) + channels * bool(bias),
    )
    return _biased(one, hidden, bool(projections))


def _biased(one: Mixer, hidden: int, biases: bool) -> Mixer:
    return replace(one, vectors=one.vectors + (one.inputs + hidden) * biases)


def _gated_delta(config: Config) -> Mixer:
    heads, groups = find(config, "linear_num_value_heads"), find(config, "linear_num_key_heads")
    key, value = find(config, "linear_key_head_dim"), find(config, "linear_value_head_dim")
    keys, values = groups * key, heads * value
    return Mixer(
        kind="gated_delta",
        inputs=2 * keys + 2 * values + 2 * heads,
        inner=values,
        channels=2 * keys + values,
        kernel=find(config, "linear_conv_kernel_dim"),
        heads=heads,
        key=key,
        value=value,
        groups=groups,
        chunk=64,
        vectors=2 * heads + value,
    )


def _kimi_delta(config: Config, family: str) -> Mixer:
    given = config.get("linear_attn_config") or {}
    heads = find(config, "linear_num_heads") or int(given.get("num_heads") or 0)
    size = find(config, "linear_head_dim") or int(given.get("head_dim") or 0)
    kernel = find(config, "linear_conv_kernel_dim") or int(given.get("short_conv_kernel_size") or 0)
    wide = heads * size
    low = family not in _GATED_HEADS
    return Mixer(
        kind="kimi_delta",
        inputs=3 * wide + heads + 2 * (size if low else wide),
        inner=wide,
        others=2 * size * wide * low,
        channels=3 * wide,
        kernel=kernel,
        heads=heads,
        key=size,
        value=size,
        groups=heads,
        chunk=64,
        vectors=wide + heads + size,
    )


def gate_columns(family: str, heads: int, head_dim: int) -> int:
    """Columns of a gate on attention's result."""
    if family in _GATED_ATTENTION:
        return heads * head_dim
    return heads if family in _GATED_HEADS else 0


def attention_vectors(config: Config, family: str, heads: int, keys: int, size: int) -> int:
    """Elements of biases and norms in a layer's attention, in families with other mixers."""
    found = 0
    if family in _NORMED_HEADS:
        found += 2 * size
    if family in _NORMED_QUERIES:
        found += (heads + keys) * size
    if config.get("kv_lora_rank"):
        found += find(config, "kv_lora_rank") + find(config, "q_lora_rank")
    if config.get("attention_bias"):
        found += (heads + 2 * keys) * size + find(config, "hidden_size")
    elif family == "recurrent_gemma":
        found += find(config, "hidden_size")
    return found


def mlp_vectors(config: Config, family: str, hidden: int, features: int, gated: bool) -> int:
    """Elements of biases of a layer's MLP without experts, in families with other mixers."""
    if config.get("mlp_bias") or family == "recurrent_gemma":
        return (1 + gated) * features + hidden
    return 0


def expert_vectors(config: Config, family: str, hidden: int) -> int:
    """Elements of gates and biases of a layer's experts, in families with other mixers."""
    shared = bool(config.get("shared_expert_intermediate_size"))
    return hidden * (family in _GATED_ATTENTION and shared)


def find(config: Config, *keys: str) -> int:
    """The value of the first key that the config has as a number; 0 if it has none."""
    return next((int(config[key]) for key in keys if config.get(key) and config[key] != "auto"), 0)
