"""Model configs of benchmarks: published shapes, small ones of the same families, and models of them with new weights.

A config is a dict of Transformers' fields with its `model_type`, as `model.config` of a run file has it.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def llama(
    hidden: int,
    layers: int,
    heads: int,
    *,
    inner: int | None = None,
    kv: int | None = None,
    vocabulary: int = 4096,
    positions: int = 512,
    **more: Any,
) -> Fields:
    """A Llama. Its MLPs are 11/4 as wide as its layers, and it has half as many key-value heads as heads, where nothing
    else is given."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner or hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or max(1, heads // 2),
        "max_position_embeddings": positions,
        **more,
    }


def gpt2(hidden: int, layers: int, heads: int, *, vocabulary: int, positions: int, **more: Any) -> Fields:
    """A GPT-2."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return {"model_type": "gpt2", "vocab_size": vocabulary, **sizes, **more}


NO_ENDS: Fields = {"bos_token_id": 0, "eos_token_id": 0}
"""For vocabularies that have no room for a family's own tokens."""


def published_llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> Fields:
    """A Llama 3 by its sizes."""
    return llama(
        hidden, layers, heads, inner=inner, kv=8, **{"vocabulary": 128256, "positions": 8192, **more}
    )


LLAMA_8B = published_llama(4096, 14336, 32, 32)
LLAMA_70B = published_llama(8192, 28672, 80, 64)
LLAMA_405B = published_llama(16384, 53248, 126, 128)
MIXTRAL_8X22B: Fields = {
    **llama(6144, 56, 48, inner=16384, kv=8, vocabulary=32768),
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3: Fields = {
    **llama(7168, 61, 128, inner=18432, kv=128, vocabulary=129280, positions=8192),
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def with_layers(fields: Fields, layers: int | None) -> Fields:
    """The same model with so many layers; its own where None."""
    name = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    return {**fields, name: layers or fields[name]}


def new_model(fields: Fields, *, dtype: str = "float32", scale: float = 3.0, device: str = "cpu") -> Any:
    """A Transformers model with new weights for generation: no token ends an answer, greedy is the default, and weights
    are large enough (`scale`) that logits are far apart. Experts are computed one by one, as on one device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    fields = dict(fields)
    attention = fields.pop("attn_implementation", "sdpa")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**fields),
        attn_implementation=attention,
        experts_implementation="eager",
        dtype=torch.float32,
    )
    model.config.eos_token_id = model.config.bos_token_id = None
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model.to(getattr(torch, dtype)).to(device).eval()


def random_prompts(lengths: Any, vocabulary: int, seed: int = 1, first: int = 0) -> list[list[int]]:
    """A prompt of random tokens from `first` on for each length."""
    import torch

    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(first, vocabulary, (length,), generator=draws).tolist() for length in lengths]


def run_file(model: Fields, *, sequence: int, strategy: Fields | None = None, **more: Any) -> Fields:
    """A run file, for what is built, captured or simulated and never written: its other sections are `more`."""
    return {
        "version": 1,
        "out": "unused",
        "model": {"config": model},
        "data": {"train": ["unused"], "sequence": sequence},
        "strategy": {"version": 1, **(strategy or {})},
        **more,
    }
