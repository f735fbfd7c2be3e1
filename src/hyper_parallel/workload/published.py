"""Shapes of published models by name, each with its source.

Names ignore case and punctuation: `Llama-3.1-405B`, `llama3-405b` and `LLAMA_3_405B` are one model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.published_shapes import ALIASES, LINES, SOURCES
from hyper_parallel.workload.shape import Shape

_ENDINGS = re.compile(r"(-(instruct|chat|base|hf|it|pt|v0\.\d|\d+k))+$")
"""Name parts of model variants with the same dimensions."""


def names() -> list[str]:
    """The models' names."""
    return [*(line[0] for line in LINES), *CONFIGS]


def shape(name: str) -> Shape:
    """A published model's shape. Raises ConfigError for an unknown name, with the nearest one.

    >>> shape("Llama-3.1-405B").layers
    126
    """
    found = known(name)
    if found is None:
        hint = nearest(name.lower(), [*names(), *ALIASES])
        # All names make a long line: they are listed only if none is similar.
        known_ones = f"; give one of {', '.join(names())}" if not hint else ""
        raise ConfigError(
            f"there is no model {name!r} among the published ones{hint}{known_ones}{' Or' if hint else '; or'} "
            "give the folder of a Transformers model with its config.json"
        )
    return found


def known(name: str) -> Shape | None:
    """The shape of a published model, or None for an unknown name."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    shapes = _shapes()
    return shapes.get(_key(plain)) or shapes.get(_key(_ENDINGS.sub("", plain)))


def _key(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _shapes() -> dict[str, Shape]:
    shapes = {line[0]: _shape(*line) for line in LINES}
    shapes |= {
        name: replace(Shape.of_config(config, name), source=source)
        for name, (source, config) in CONFIGS.items()
    }
    shapes |= {alias: shapes[name] for alias, name in ALIASES.items()}
    keyed = {_key(name): shape for name, shape in shapes.items()}
    assert len(keyed) == len(shapes), "no two names are one without punctuation"
    return keyed


def _shape(
    name: str,
    source: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    rest: dict[str, Any],
) -> Shape:
    fields: dict[str, Any] = {"gated": True, "head_dim": hidden // heads, **rest}
    latent = fields.get("latent")
    if latent is not None:
        fields["head_dim"] = latent.plain + latent.rotary
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        source=SOURCES[source],
        **fields,
    )


# Published models with other token mixers than attention, as Transformers configs with their sources.
#
# A config says more of such layers than dimensions do: `published.shape` reads it, and a run file gets it as it stands.

_MAMBA_2 = {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "mamba_head_dim": 64}
_NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "head_dim": 128,
    **_MAMBA_2,
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _pattern(text: str) -> list[str]:
    """The kinds of blocks that a pattern of letters, as in `hybrid_override_pattern`, stands for."""
    return [_LETTERS[letter] for letter in text]


CONFIGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "nemotron-h-8b": (
        "arXiv 2504.03624, table 1, and config.json of nvidia/Nemotron-H-8B-Base-8K",
        {
            **_NEMOTRON,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "num_key_value_heads": 8,
            "mamba_num_heads": 128,
            "max_position_embeddings": 8192,
            "layers_block_type": _pattern("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        },
    ),
    "nemotron-3-nano": (
        "arXiv 2512.20848 and config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
        {
            **_NEMOTRON,
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "max_position_embeddings": 262144,
            "layers_block_type": _pattern("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        },
    ),
    "nemotron-3-super": (
        "config.json of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B, without the modules that predict more tokens",
        {
            **_NEMOTRON,
            "hidden_size": 4096,
            "intermediate_size": 2688,
            "num_key_value_heads": 2,
            "mamba_num_heads": 128,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
            "moe_latent_size": 1024,
            "max_position_embeddings": 262144,
            "layers_block_type": _pattern(
                "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
            ),
        },
    ),
    "qwen3-next-80b-a3b": (
        "config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, without the module that predicts two tokens",
        {
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    ),
    "jamba-v0.1": (
        "arXiv 2403.19887 and config.json of ai21labs/Jamba-v0.1",
        {
            "model_type": "jamba",
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
            "max_position_embeddings": 262144,
        },
    ),
    "minimax-text-01": (
        "arXiv 2501.08313, section 2, and config.json of MiniMaxAI/MiniMax-Text-01",
        {
            "model_type": "minimax",
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 2,
            "block_size": 256,
            "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
            "max_position_embeddings": 10240000,
        },
    ),
    "kimi-linear-48b-a3b": (
        "arXiv 2510.26692 and config.json of moonshotai/Kimi-Linear-48B-A3B-Base",
        {
            "model_type": "kimi_linear",
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "layer_types": [
                "linear_attention" if layer % 4 and layer != 27 else "full_attention"
                for layer in range(1, 28)
            ],
            "max_position_embeddings": 1048576,
        },
    ),
}


# Modules of multi-token prediction that published models are trained with (arXiv 2412.19437, section 2.2).
#
# A config names their number (`num_nextn_predict_layers`), and Transformers builds the model without them: a step
# trains them only where its framework does.

MODULES: dict[str, int] = {
    "deepseek-v3": 1,
    "glm-4.5": 1,
    "glm-4.5-air": 1,
    "pangu-ultra-moe-718b": 1,
    "nemotron-3-super": 2,
    "qwen3-next-80b-a3b": 1,
}
"""By the published model's name; sources as of `published_shapes` and `published_hybrids`."""


def of_published(name: str) -> int:
    """Modules that a published model is trained with; 0 for those that have none."""
    return MODULES.get(name, 0)
